"""One distillation step, its loss and its gradient, against computations that pack nothing.

At merge depth 0 the plain computation takes one row at a time, builds each unit's embedding by
itself, lets transformers make all logits, and leaves the gradient to autograd. Deeper ones, and
adapters, are compared with one forward of the whole model on raw ids (``oracle_states``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

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
from umim_core.config.form import UnitPositions
from umim_core.errors import CorpusError
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.packing import Segmentation
from umim_core.training.step import DistillModel

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
