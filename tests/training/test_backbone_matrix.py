"""One distillation step over a matrix of architectures, heads tied and untied, in float64.

The naive step runs one row at a time, builds every unit's embedding by itself, lets transformers
make all logits and leaves the gradient to autograd.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from support.merged_models import fresh_model
from support.tiny_models import random_model, tiny_config
from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.merging.packing import Segmentation
from umim_core.training.step import DistillModel

Rows = list[NDArray[np.int64]]
VOCAB, HIDDEN, POSITIONS = 23, 16, 32
# phi's head has a bias.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi", "gpt-neox", "gpt2", "gpt-neo")
# transformers computes GPT-Neo's attention scores in single precision whatever the model.
TOLERANCE = {family: 1e-6 if family == "gpt-neo" else 1e-9 for family in FAMILIES}
# The quick tests have each family once, tied and untied by turns.
MATRIX = [
    pytest.param(
        family,
        tied,
        id=f"{family}-{'tied' if tied else 'untied'}",
        marks=[pytest.mark.full] if tied == (number % 2 == 0) else [],
    )
    for number, family in enumerate(FAMILIES)
    for tied in (False, True)
]
# Unit lengths: merges first, last, in a row, alone, everywhere, nowhere; rows of 1 to 13 tokens.
UNITS = [[2, 1, 1], [1, 1, 3], [1, 2, 3, 4, 1, 1, 1], [4], [2, 2, 2], [1, 1, 1, 1], [1]]


def build(family: str, *, tied: bool) -> Backbone:
    config = tiny_config(
        family, vocab_size=VOCAB, max_position_embeddings=32, tie_word_embeddings=tied
    )
    model = random_model(config).double()
    head = model.get_output_embeddings()
    assert (head.weight is model.get_input_embeddings().weight) is tied
    if head.bias is not None:
        nn.init.normal_(head.bias)
    return wrap_backbone(model, None)


def batch() -> tuple[Rows, list[Segmentation]]:
    rng = np.random.default_rng(2)
    rows = [rng.integers(0, VOCAB, sum(lengths)) for lengths in UNITS]
    lengths = [np.array(row, dtype=np.int64) for row in UNITS]
    return rows, [(np.cumsum(row) - row, row) for row in lengths]


def naive_loss(model: DistillModel, ids: NDArray[np.int64], cut: Segmentation) -> Tensor:
    """Soft-target cross-entropy of one row, summed over the units from its first merge on."""
    table, network = model.backbone.embedding_weight, model.backbone.model
    units, ends, end = [], [], 0
    for length in cut[1].tolist():
        span = table[torch.from_numpy(ids[end : end + length])]
        units.append(
            span[0] if length == 1 else model.module(span[None], torch.tensor([length]))[0]
        )
        end += length
        ends.append(end - 1)
    merged = [unit for unit, length in enumerate(cut[1].tolist()) if length > 1]
    if not merged:
        return torch.zeros((), dtype=torch.float64)
    student = network(inputs_embeds=torch.stack(units)[None]).logits[0, merged[0] :]
    teacher = network(input_ids=torch.from_numpy(ids)[None]).logits[0, ends[merged[0] :]]
    return -(teacher.detach().softmax(-1) * student.log_softmax(-1)).sum()


def gradients(model: DistillModel, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.module.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize(("family", "tied"), MATRIX)
def test_loss_and_gradient_of_a_step_equal_the_naive_step(family: str, tied: bool) -> None:
    model = DistillModel(fresh_model(build(family, tied=tied), [], 0.2, 1))
    rows, cuts = batch()
    loss = model(rows, cuts)
    parts = [naive_loss(model, row, cut) for row, cut in zip(rows, cuts, strict=True)]
    expected = torch.stack(parts).sum()
    assert loss.rows == sum((3, 1, 6, 1, 3))
    bound = TOLERANCE[family]
    torch.testing.assert_close(loss.total, expected, atol=0.0, rtol=bound)
    found, wanted = gradients(model, loss.total), gradients(model, expected)
    for name, value in wanted.items():
        assert int(torch.count_nonzero(value)) > 0, name
        torch.testing.assert_close(found[name], value, atol=bound, rtol=bound, msg=name)
