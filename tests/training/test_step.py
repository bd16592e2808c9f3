"""One distillation step, its loss and its gradient, against computations that pack nothing.

At merge depth 0 the plain computation takes one row at a time, builds each unit's embedding by
itself, lets transformers make all logits, and leaves the gradient to autograd. Deeper ones, and
adapters, are compared with one forward of the whole model on raw ids (``oracle_states``). The bound
on a GPU's memory is held against what autograd saves of real steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedConfig

from support import engine_matrix
from support.engine_matrix import random_prompts, random_rules
from support.merge_modules import FORMS, give_rows
from support.merged_models import (
    cuts_of,
    fresh_model,
    oracle_states,
    random_merged_model,
    units_of_lengths,
)
from support.tiny_models import FAMILIES, forwards_of, random_model, tiny_config
from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.backbone.shape import BackboneShape
from umim_core.config.form import ModuleForm, UnitPositions
from umim_core.errors import CorpusError
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.merging.packing import Segmentation
from umim_core.training.step import DistillModel, step_memory

Rows = list[NDArray[np.int64]]
VOCAB = 23
# Merges first, last, in a row, alone, everywhere, nowhere; rows of 1 to 13 tokens.
UNITS = [[2, 1, 1], [1, 1, 3], [1, 2, 3, 4, 1, 1, 1], [4], [2, 2, 2], [1, 1, 1, 1], [1]]
ALIGNED = 3 + 1 + 6 + 1 + 3
DEEP = [("llama", 1, 0), ("llama", 1, 3), ("gpt2", 1, 3)]


def build(family: str, *, tied: bool = False, dtype: torch.dtype = torch.float64) -> Backbone:
    """A random backbone; phi's head has a bias."""
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": 32, "tie_word_embeddings": tied}
    model = random_model(tiny_config(family, **sizes)).to(dtype)
    head = model.get_output_embeddings()
    assert (head.weight is model.get_input_embeddings().weight) is tied
    if head.bias is not None:
        nn.init.normal_(head.bias, generator=torch.Generator().manual_seed(0))
    return wrap_backbone(model, None)


def model_of(backbone: Backbone, form: str = "paper", **options: Any) -> DistillModel:
    positions: UnitPositions = options.pop("unit_positions", "compact")
    return DistillModel(fresh_model(backbone, [], 0.2, 1, positions, **FORMS[form]), **options)


def batch(units: list[list[int]] = UNITS) -> tuple[Rows, list[Segmentation]]:
    rng = np.random.default_rng(2)
    rows = [rng.integers(0, VOCAB, sum(row)) for row in units]
    return rows, list(map(units_of_lengths, units))


def plain_loss(
    model: DistillModel, rows: Rows, cuts: list[Segmentation], unit_positions: str = "compact"
) -> Tensor:
    """Cross-entropy sum over aligned rows.

    Where raw positions are preserved, a unit's position is that of its last raw token.
    """
    backbone, total = model.backbone, torch.zeros((), dtype=torch.float64)
    table, network = backbone.embedding_weight, backbone.model
    for ids, (starts, lengths) in zip(rows, cuts, strict=True):
        merged = np.flatnonzero(lengths > 1)
        if not len(merged):
            continue
        units = []
        for start, length in zip(starts, lengths, strict=True):
            tokens, size = torch.from_numpy(ids[start : start + length]), torch.tensor([length])
            span = table[tokens]
            units.append(
                span[0] if length == 1 else model.module(span[None], size, tokens[None])[0]
            )
        ends, at = starts + lengths - 1, {}
        if unit_positions == "preserved":
            place, mask = torch.from_numpy(ends)[None], torch.ones(1, len(ends))
            at = {"position_ids": place, "attention_mask": mask}
        student = network(inputs_embeds=torch.stack(units)[None], **at).logits[0, merged[0] :]
        teacher = network(input_ids=torch.from_numpy(ids)[None]).logits[0, ends[merged[0] :]]
        total = total - (teacher.detach().softmax(-1) * student.log_softmax(-1)).sum()
    return total


def gradients(model: DistillModel, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.module.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters)
    return {name: value.to_dense() for name, value in zip(names, found, strict=True)}


# The quick tests have each family once, tied and untied by turns; each axis beside that alone.
CASES = [
    *(
        pytest.param(
            {"family": family, "tied": tied},
            marks=[pytest.mark.full] if tied == (number % 2 == 0) else [],
        )
        for number, family in enumerate(FAMILIES)
        for tied in (False, True)
    ),
    *({"form": form} for form in FORMS),
    *({"family": family, "unit_positions": "preserved"} for family in ("llama", "gpt2")),
    *({"family": family, "micro_batch": n} for family in ("qwen2", "gpt2") for n in (1, 2, 3, 100)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradient_equal_the_plain_computation(case: dict[str, Any]) -> None:
    options = dict(case)
    family, tied = options.pop("family", "gpt2"), options.pop("tied", False)
    model, (rows, cuts) = model_of(build(family, tied=tied), **options), batch()
    if "form" in case:
        give_rows(model.module, [tuple(rows[0][:2]), tuple(rows[1][2:5]), (0, 0)])
    loss = model(rows, cuts)
    expected = plain_loss(model, rows, cuts, case.get("unit_positions", "compact"))
    # transformers computes GPT-Neo's attention scores in single precision whatever the model.
    bound = 1e-6 if family == "gpt-neo" else 1e-9
    assert loss.weight == ALIGNED
    torch.testing.assert_close(loss.total, expected, atol=bound, rtol=bound)
    found = gradients(model, loss.total)
    for name, value in gradients(model, expected).items():
        assert "form" in case or int(torch.count_nonzero(value)) > 0, name
        torch.testing.assert_close(found[name], value, atol=bound, rtol=100 * bound, msg=name)
    if "form" in case:
        assert (found["rows.table"] != 0).any(dim=1).sum() == 2
    assert all(weight.grad is None for weight in model.backbone.model.parameters())
    assert {name.partition(".")[0] for name in model.state_dict()} == {"module"}


def inside(
    family: str, depth: int, rank: int, dtype: torch.dtype = torch.float64
) -> tuple[MergedModel, Rows, list[Segmentation]]:
    backbone = engine_matrix.build(family, dtype)
    merged_model = random_merged_model(backbone, random_rules(3, False), depth, rank, rows=30)
    merged_model.require_module().requires_grad_(True)
    rows = [np.concatenate(random_prompts(seed, 2)) for seed in range(4)]
    return merged_model, rows, [merged_model.segment(ids) for ids in rows]


@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize(("family", "depth", "rank"), DEEP)
def test_divergence_and_gradient_inside_the_model_are_those_of_the_oracle(
    family: str, depth: int, rank: int, micro_batch: int
) -> None:
    merged_model, rows, cuts = inside(family, depth, rank)
    backbone, count, parts = merged_model.backbone, 0, []
    for ids in rows:
        units = cuts_of(merged_model.require_matcher(), ids)
        student = backbone.head(oracle_states(merged_model, ids.tolist(), units)).log_softmax(-1)
        raw = backbone.embed(torch.tensor([ids.tolist()]))
        teacher = backbone.head(backbone.hidden(raw)[0]).detach().log_softmax(-1)
        first = next(k for k, (_, n) in enumerate(units) if n > 1)
        for k, (start, n) in list(enumerate(units))[first:]:
            target = teacher[start + n - 1]
            parts.append((target.exp() * (target - student[k])).sum())
            count += 1
    expected, model = torch.stack(parts).sum(), DistillModel(merged_model, micro_batch=micro_batch)
    loss = model(rows, cuts)
    assert loss.weight == count
    assert float(loss.kl) == pytest.approx(float(expected.detach()), abs=1e-9)
    found = gradients(model, loss.total)
    for name, value in gradients(model, expected).items():
        torch.testing.assert_close(found[name], value, atol=1e-9, rtol=1e-7, msg=name)
    moved = {name for name, value in found.items() if value.abs().sum() > 0}
    assert {"norm_o.weight", "linear_kv.weight", "rows.table"} <= moved
    assert not rank or sum(name.startswith("adapters.") for name in moved) > 6


@pytest.mark.parametrize(("family", "depth", "rank"), [*DEEP, ("llama", 0, 3)])
def test_a_frozen_parameter_gets_no_gradient_and_changes_no_other(
    family: str, depth: int, rank: int
) -> None:
    merged_model, rows, cuts = inside(family, depth, rank)
    module = merged_model.require_module()
    first = next((module if module.adapters is None else module.adapters).parameters())
    found = []
    for trained, micro_batch in ((True, 4), (False, 1)):
        module.zero_grad(set_to_none=True)
        first.requires_grad_(trained)
        DistillModel(merged_model, micro_batch=micro_batch)(rows, cuts).total.backward()
        found.append([None if p.grad is None else p.grad.to_dense() for p in module.parameters()])
    assert first.grad is None
    for whole, part in zip(*found, strict=True):
        assert part is None or torch.allclose(whole, part, atol=1e-10)
    assert sum(part is None for part in found[1]) == 1
    assert all(whole.abs().sum() > 0 for whole in found[0][-3:])


def test_the_loss_counts_the_states_that_it_is_given_and_rows_must_fit() -> None:
    merged_model, rows, cuts = inside("llama", 1, 0)
    whole = DistillModel(merged_model)(rows[:1], cuts[:1])
    states = np.arange(len(rows[0])) >= len(rows[0]) - 3
    late = DistillModel(merged_model)(rows[:1], cuts[:1], [states])
    ends = cuts[0][0] + cuts[0][1]
    assert late.weight == int((ends > len(rows[0]) - 3).sum()) < whole.weight
    with pytest.raises(CorpusError, match=r"32 positions; got 33 positions.*shorter segments"):
        model_of(build("gpt2"))(*batch([[2] + [1] * 31]))


def test_a_micro_batch_holds_only_its_own_rows() -> None:
    model = model_of(build("gpt2"), micro_batch=2)
    with forwards_of(model.backbone.trunk) as shapes:
        model(*batch([[1, 2, 1, 4, 1], [1, 1, 1, 1, 3], [2, 2, 3, 4, 1], [1, 1, 1], [1], [2]]))
    # teacher, student; rows of fewest units first; rows of one length are a batch
    assert shapes == [(1, 2 + 9), (1, 1 + 5), (1, 7 + 12), (2, 5)]


@pytest.mark.parametrize("form", FORMS)
def test_without_merges_the_loss_is_zero_and_still_touches_every_parameter(form: str) -> None:
    model = model_of(build("gpt2"), form)
    give_rows(model.module, [(1, 2)])
    loss = model(*batch([[1, 1, 1], [1], [1] * 9]))
    assert (float(loss.total.detach()), float(loss.kl), loss.weight) == (0.0, 0.0, 0)
    for name, value in gradients(model, loss.total).items():
        assert int(torch.count_nonzero(value)) == 0, name  # NaN would count


@pytest.mark.parametrize(("depth", "rank"), [(None, 0), (1, 3)])
def test_bfloat16_products_leave_the_loss_in_single_precision(depth: int | None, rank: int) -> None:
    merged_model, rows, cuts = (
        (fresh_model(build("llama", dtype=torch.float32), [], 0.2, 1), *batch())
        if depth is None
        else inside("llama", depth, rank, torch.float32)
    )
    exact = DistillModel(merged_model)(rows, cuts)
    model = DistillModel(merged_model, autocast=True)
    rounded = model(rows, cuts)
    assert rounded.total.dtype is torch.float32
    assert float(rounded.total.detach()) != float(exact.total.detach())
    torch.testing.assert_close(rounded.total, exact.total, atol=0.0, rtol=2e-2)
    for name, value in gradients(model, rounded.total).items():
        assert value.dtype is torch.float32, name
        assert bool(torch.isfinite(value).all()), name


# The bound on the memory of a GPU

ROWS, LENGTH, WORDS = 3, 64, 97
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": tiny_config(
        vocab_size=WORDS, hidden_size=64, intermediate_size=176, num_hidden_layers=4
    ),
    "gpt2": tiny_config(
        "gpt2", vocab_size=WORDS, hidden_size=48, num_hidden_layers=3, intermediate_size=None
    ),
}
BOUND_FORMS = {n: ModuleForm(**FORMS[n]) for n in ("paper", "learned", "depth 3", "linear")}
FEW = [2] + [1] * (LENGTH - 2)  # one merge
HALF = [1, 4, 1, 2] * (LENGTH // 8)


def bound(name: str, form: ModuleForm = BOUND_FORMS["paper"], **options: Any) -> dict[str, float]:
    shape = BackboneShape.of_config(CONFIGS[name])
    shape = shape.model_copy(update={"vocab_size": options.pop("vocab_size", WORDS)})
    how = {"rows": ROWS, "bf16": False, "strategy": "ddp", "gpus": 2, **options}
    return step_memory(shape, form, segment_length=LENGTH, **how)


def sized(name: str, dtype: torch.dtype) -> Backbone:
    return wrap_backbone(random_model(CONFIGS[name], attention="sdpa").to(dtype), None)


def saved_bytes(backbone: Backbone, form: ModuleForm, lengths: list[int]) -> int:
    """Bytes that autograd keeps during a step, the weights themselves left out."""
    module = MergeModule(backbone.hidden_size, form)
    module.initialise(0.02, torch.Generator().manual_seed(1))
    model = DistillModel(
        MergedModel(backbone, module, None),
        autocast=backbone.dtype is torch.bfloat16,
        micro_batch=ROWS,
    )
    rng = np.random.default_rng(2)
    rows = [rng.integers(0, WORDS, LENGTH) for _ in range(ROWS)]
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(rows, [units_of_lengths(lengths)] * ROWS)
    weights = (*backbone.model.parameters(), *backbone.model.buffers())
    frozen = {tensor.untyped_storage().data_ptr() for tensor in weights}
    trained = (torch.nn.Parameter,)
    sizes = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in kept
        if not isinstance(tensor, trained) and not isinstance(tensor._base, trained)
    }
    return sum(size for place, size in sizes.items() if place not in frozen)


@pytest.mark.parametrize("form", BOUND_FORMS)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_step_saves_less_than_the_bound_and_most_of_it_without_merges(
    name: str, form: str, bf16: bool
) -> None:
    backbone = sized(name, torch.bfloat16 if bf16 else torch.float32)
    most = bound(name, BOUND_FORMS[form], bf16=bf16)["activations, loss"]
    few, half = (saved_bytes(backbone, BOUND_FORMS[form], lengths) for lengths in (FEW, HALF))
    assert half < few < most  # the rest is the backward pass of a block, which saves nothing
    assert few > 0.5 * most


def test_the_parts_are_those_of_the_formulas() -> None:
    weights = sum(p.numel() for p in sized("llama", torch.float32).model.parameters())
    for bf16, width in ((False, 4), (True, 2)):
        assert bound("llama", bf16=bf16)["weights"] == pytest.approx(width * weights, rel=0.02)
    size = 4 * sum(p.numel() for p in MergeModule(64).parameters())
    copies = {("ddp", 1): 4, ("ddp", 2): 5, ("deepspeed", 1): 6, ("deepspeed", 4): 3}
    for (strategy, gpus), times in copies.items():
        parts = bound("llama", strategy=strategy, gpus=gpus)
        assert parts["module and AdamW"] == pytest.approx(times * size)
    plain, rowed = (bound("llama", ModuleForm(rule_rows=k)) for k in (0, 1000))
    added = rowed["module and AdamW"] - plain["module and AdamW"]
    assert added == pytest.approx(1000 * CONFIGS["llama"].hidden_size * 4 * 3)  # and two moments
    small, large = (bound("llama", rows=100, gpus=1, vocab_size=k) for k in (100_000, 200_000))
    added = large["activations, loss"] - small["activations, loss"]
    assert added == pytest.approx(4 * 4 * 1024 * 100_000)  # four chunks of 1,024 rows in float32
