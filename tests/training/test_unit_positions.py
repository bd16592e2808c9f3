"""A distillation step whose student keeps raw positions, against a plain one row at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from support.tiny_models import random_backbone
from umim_core.config.form import UnitPositions
from umim_core.errors import CorpusError
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.merging.packing import Segmentation
from umim_core.training.step import DistillModel

VOCAB, HIDDEN = 19, 16
UNITS = [[1, 2, 1, 4, 1], [1, 1, 1, 1, 3], [2, 2, 3, 4, 1], [1, 1, 1], [1], [2]]


def model_for(kind: str, unit_positions: UnitPositions) -> DistillModel:
    backbone = random_backbone(kind, torch.float64, vocab_size=VOCAB, max_position_embeddings=32)
    module = MergeModule(HIDDEN).double()
    module.initialise(0.2, torch.Generator().manual_seed(1))
    return DistillModel(MergedModel(backbone, module, None, unit_positions))


def batch() -> tuple[list[NDArray[np.int64]], list[Segmentation]]:
    rng = np.random.default_rng(2)
    rows = [rng.integers(0, VOCAB, sum(lengths)) for lengths in UNITS]
    cuts = [np.array(lengths, dtype=np.int64) for lengths in UNITS]
    return rows, [(np.cumsum(cut) - cut, cut) for cut in cuts]


def plain_loss(model: DistillModel) -> Tensor:
    """Cross-entropy sum over aligned rows; a unit's position is that of its last raw token."""
    backbone, total = model.backbone, torch.zeros((), dtype=torch.float64)
    for ids, (starts, lengths) in zip(*batch(), strict=True):
        merged = np.flatnonzero(lengths > 1)
        if not len(merged):
            continue
        units, ends = [], []
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            span = backbone.embedding_weight[torch.from_numpy(ids[start : start + length])]
            units.append(
                span[0] if length == 1 else model.module(span[None], torch.tensor([length]))[0]
            )
            ends.append(start + length - 1)
        student = backbone.model(
            inputs_embeds=torch.stack(units)[None],
            position_ids=torch.tensor([ends]),
            attention_mask=torch.ones(1, len(ends)),
        ).logits[0]
        with torch.no_grad():
            teacher = backbone.model(input_ids=torch.from_numpy(ids)[None]).logits[0]
        for unit in range(merged[0], len(units)):
            wanted = teacher[ends[unit]].softmax(-1)
            total = total - (wanted * student[unit].log_softmax(-1)).sum()
    return total


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_loss_and_gradient_equal_the_plain_computation(kind: str) -> None:
    model = model_for(kind, "preserved")
    parameters = list(model.module.parameters())
    found, wanted = model(*batch()).total, plain_loss(model)
    torch.testing.assert_close(found, wanted, atol=1e-9, rtol=1e-9)
    ours, theirs = (torch.autograd.grad(loss, parameters) for loss in (found, wanted))
    for value, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(value, other, atol=1e-9, rtol=1e-7)


def test_a_row_beyond_the_positions_is_refused() -> None:
    model = model_for("gpt2", "compact")
    row, lengths = np.zeros(33, dtype=np.int64), np.array([2] + [1] * 31)
    with pytest.raises(CorpusError, match=r"32 positions.*33 tokens.*shorter segments"):
        model([row], [(lengths.cumsum() - lengths, lengths)])
