"""One distillation step over tiny backbones of four families, against a plain float64 computation.

The plain computation takes one row at a time, builds each unit's embedding by itself, lets
transformers make all logits, and leaves the gradient to autograd.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from support.merge_modules import FORMS, give_rows
from support.merged_models import fresh_model
from support.tiny_models import random_backbone
from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.config.form import UnitPositions
from umim_core.errors import CorpusError
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.merging.packing import Segmentation
from umim_core.training.step import DistillModel

Rows = list[NDArray[np.int64]]
VOCAB, HIDDEN = 19, 16
FAMILIES = ("gpt-neox", "gpt2", "llama", "qwen2-tied")
# Unit lengths per row: merges early, late, everywhere, nowhere; rows of 1 to 12 tokens.
UNITS = [[1, 2, 1, 4, 1], [1, 1, 1, 1, 3], [2, 2, 3, 4, 1], [1, 1, 1], [1], [2]]


@pytest.fixture(params=FAMILIES)
def backbone(request: pytest.FixtureRequest) -> Backbone:
    return build(request.param)


def build(name: str, dtype: torch.dtype = torch.float64) -> Backbone:
    tied = {"tie_word_embeddings": True} if name.endswith("-tied") else {}
    family = name.removesuffix("-tied")
    return random_backbone(family, dtype, vocab_size=VOCAB, max_position_embeddings=32, **tied)


def model_for(
    backbone: Backbone, form: str = "paper", unit_positions: UnitPositions = "compact"
) -> DistillModel:
    return DistillModel(fresh_model(backbone, [], 0.2, 1, unit_positions, **FORMS[form]))


def wrapped(backbone: Backbone, module: MergeModule, **options: object) -> DistillModel:
    return DistillModel(MergedModel(backbone, module, None, "compact"), **options)


def batch(units: list[list[int]] = UNITS) -> tuple[Rows, list[Segmentation]]:
    rng = np.random.default_rng(2)
    rows = [rng.integers(0, VOCAB, sum(lengths)) for lengths in units]
    cuts = []
    for lengths in units:
        array = np.array(lengths, dtype=np.int64)
        cuts.append((np.cumsum(array) - array, array))
    return rows, cuts


def plain_loss(
    model: DistillModel,
    rows: Rows,
    cuts: list[Segmentation],
    unit_positions: UnitPositions = "compact",
) -> tuple[Tensor, int]:
    """Cross-entropy sum over aligned rows, and their number.

    Where raw positions are preserved, a unit's position is that of its last raw token.
    """
    backbone, total, count = model.backbone, torch.zeros((), dtype=torch.float64), 0
    table = backbone.embedding_weight
    for ids, (starts, lengths) in zip(rows, cuts, strict=True):
        merged = np.flatnonzero(lengths > 1)
        if not len(merged):
            continue
        units = []
        for start, length in zip(starts, lengths, strict=True):
            span = table[torch.from_numpy(ids[start : start + length])]
            own, size = torch.from_numpy(ids[start : start + length]), torch.tensor([length])
            units.append(span[0] if length == 1 else model.module(span[None], size, own[None])[0])
        ends, at = starts + lengths - 1, {}
        if unit_positions == "preserved":
            at = {
                "position_ids": torch.from_numpy(ends)[None],
                "attention_mask": torch.ones(1, len(ends)),
            }
        student = backbone.model(inputs_embeds=torch.stack(units)[None], **at).logits[0]
        with torch.no_grad():
            teacher = backbone.model(input_ids=torch.from_numpy(ids)[None]).logits[0]
        for unit in range(merged[0], len(units)):
            p_t = teacher[ends[unit]].softmax(-1)
            total = total - (p_t * student[unit].log_softmax(-1)).sum()
            count += 1
    return total, count


def gradients(model: DistillModel, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.module.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters)
    return {name: value.to_dense() for name, value in zip(names, found, strict=True)}


@pytest.mark.parametrize("unit_positions", ["compact", "preserved"])
def test_loss_and_gradient_equal_the_plain_computation(
    backbone: Backbone, unit_positions: UnitPositions
) -> None:
    model = model_for(backbone, unit_positions=unit_positions)
    rows, cuts = batch()
    loss = model(rows, cuts)
    expected, count = plain_loss(model, rows, cuts, unit_positions)
    assert loss.rows == count == 11
    torch.testing.assert_close(loss.total, expected, atol=1e-9, rtol=1e-9)
    found, wanted = gradients(model, loss.total), gradients(model, expected)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=1e-9, rtol=1e-7, msg=name)


def test_a_row_beyond_the_positions_is_refused() -> None:
    with pytest.raises(CorpusError, match=r"32 positions.*33 tokens.*shorter segments"):
        model_for(build("gpt2"))(*batch([[2] + [1] * 31]))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gets_its_plain_gradient_and_so_do_its_rule_rows(form: str) -> None:
    model = model_for(build("gpt2"), form)
    rows, cuts = batch()
    give_rows(model.module, [tuple(rows[0][1:3]), tuple(rows[1][4:7]), (0, 0)])
    found = gradients(model, model(rows, cuts).total)
    for name, value in gradients(model, plain_loss(model, rows, cuts)[0]).items():
        torch.testing.assert_close(found[name], value, atol=1e-9, rtol=1e-7, msg=name)
    assert sorted((found["rows.table"] != 0).any(dim=1).tolist()) == [False, True, True]


def test_a_batch_is_the_sum_of_its_rows_whatever_the_padding(backbone: Backbone) -> None:
    model = model_for(backbone)
    rows, cuts = batch()
    whole = model(rows, cuts)
    parts = [model([row], [cut]) for row, cut in zip(rows, cuts, strict=True)]
    assert whole.rows == sum(part.rows for part in parts)
    for name in ("total", "kl"):
        alone = torch.stack([getattr(part, name) for part in parts]).sum()
        torch.testing.assert_close(getattr(whole, name), alone, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("rows_at_once", [1, 2, 3, 100])
def test_micro_batches_change_neither_loss_nor_gradient(
    backbone: Backbone, rows_at_once: int
) -> None:
    model = model_for(backbone)
    rows, cuts = batch()
    parts = wrapped(backbone, model.module, micro_batch=rows_at_once)
    found, (expected, count) = parts(rows, cuts), plain_loss(model, rows, cuts)
    assert found.rows == count
    torch.testing.assert_close(found.total, expected, atol=1e-9, rtol=1e-9)
    wanted = gradients(model, expected)
    for name, value in gradients(model, found.total).items():
        torch.testing.assert_close(value, wanted[name], atol=1e-9, rtol=1e-7, msg=name)


def test_a_micro_batch_holds_only_its_own_rows() -> None:
    backbone, shapes = build("gpt2"), []
    model = wrapped(backbone, model_for(backbone).module, micro_batch=2)
    backbone.model.transformer.register_forward_pre_hook(
        lambda trunk, args, inputs: shapes.append(tuple(inputs["inputs_embeds"].shape[:2])),
        with_kwargs=True,
    )
    model(*batch())
    # teacher, student; rows of fewest units first; rows of one length are a batch
    assert shapes == [(1, 2 + 9), (1, 1 + 5), (1, 7 + 12), (2, 5)]


def test_the_backbone_gets_no_gradient_and_every_parameter_of_the_module_does(
    backbone: Backbone,
) -> None:
    model = model_for(backbone)
    before = [parameter.clone() for parameter in backbone.model.parameters()]
    model(*batch()).total.backward()
    assert {name.partition(".")[0] for name in model.state_dict()} == {"module"}
    for parameter, old in zip(backbone.model.parameters(), before, strict=True):
        assert parameter.grad is None
        assert torch.equal(parameter, old)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert int(torch.count_nonzero(parameter.grad)) > 0, name


def test_without_merges_the_loss_is_zero_and_still_touches_every_parameter(
    backbone: Backbone,
) -> None:
    model = model_for(backbone)
    loss = model(*batch([[1, 1, 1], [1], [1] * 9]))
    assert (float(loss.total.detach()), float(loss.kl), loss.rows) == (0.0, 0.0, 0)
    loss.total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert int(torch.count_nonzero(parameter.grad)) == 0, name  # NaN would count


@pytest.mark.parametrize("form", FORMS)
def test_without_merges_every_form_takes_part_in_the_exchange_of_gradients(form: str) -> None:
    model = model_for(build("gpt2"), form)
    give_rows(model.module, [(1, 2)])
    model(*batch([[1, 1, 1]])).total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert int(torch.count_nonzero(parameter.grad.to_dense())) == 0, name  # NaN would count


def test_bfloat16_products_leave_the_loss_in_single_precision(backbone: Backbone) -> None:
    single = wrap_backbone(backbone.model.float(), None)
    model = model_for(single)
    rows, cuts = batch()
    exact = model(rows, cuts)
    rounded = wrapped(single, model.module, autocast=True)(rows, cuts)
    assert rounded.total.dtype is torch.float32
    assert float(rounded.total.detach()) != float(exact.total.detach())
    torch.testing.assert_close(rounded.total, exact.total, atol=0.0, rtol=2e-2)
    for name, value in gradients(model, rounded.total).items():
        assert value.dtype is torch.float32, name
        assert bool(torch.isfinite(value).all()), name
