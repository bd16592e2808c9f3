"""Hidden-state terms of the loss against a plain float64 computation, row by row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from support.tiny_models import random_backbone
from umim_core.backbone.backbone import Backbone
from umim_core.config.hidden_term import HiddenTerm
from umim_core.distill.hidden_loss import AlignedStates, deviations, hidden_term
from umim_core.distill.step import DistillModel, StepLoss
from umim_core.merging.compressed import Compressed
from umim_core.merging.module import MergeModule
from umim_core.merging.packing import Segmentation

VOCAB, HIDDEN, LAYERS = 19, 16, 3
# Unit lengths per row: merges early, late, everywhere (no raw token is aligned), nowhere.
UNITS = [[1, 2, 1, 4, 1], [1, 1, 1, 1, 3], [2, 2, 3, 4, 1], [2], [1, 1, 1], [3, 1, 1]]
TERMS = {
    "last": (HiddenTerm(layers="last"),),
    "all": (HiddenTerm(layers="all", weight=3.0),),
    "last, mse, aligned": (HiddenTerm(layers="last", distance="mse", rows="aligned"),),
    "both": (
        HiddenTerm(layers="all", distance="mse", weight=0.5),
        HiddenTerm(layers="last", rows="aligned", weight=2.0),
    ),
}
# Llama's RMSNorm is single precision in any model.
FAMILIES = {"gpt2": 1e-9, "llama": 1e-5}


def model_for(
    name: str, terms: tuple[HiddenTerm, ...] = (), micro_batch: int | None = None
) -> DistillModel:
    backbone = random_backbone(
        name, torch.float64, vocab_size=VOCAB, max_position_embeddings=32, num_hidden_layers=LAYERS
    )
    module = MergeModule(HIDDEN).to(backbone.dtype)
    module.initialise(0.2, torch.Generator().manual_seed(1))
    model = Compressed(backbone, module, None, "compact")
    return DistillModel(model, hidden_terms=terms, micro_batch=micro_batch)


def batch() -> tuple[list[NDArray[np.int64]], list[Segmentation]]:
    rng = np.random.default_rng(2)
    rows = [rng.integers(0, VOCAB, sum(lengths)) for lengths in UNITS]
    lengths = [np.array(row, dtype=np.int64) for row in UNITS]
    return rows, [(np.cumsum(row) - row, row) for row in lengths]


def all_states(backbone: Backbone, embeddings: Tensor) -> list[Tensor]:
    """What a row's blocks give by themselves [S, d], the last after the final norm."""
    out = backbone.model(inputs_embeds=embeddings[None], output_hidden_states=True)
    return [hidden[0] for hidden in out.hidden_states[1:]]


def plain_term(model: DistillModel, term: HiddenTerm) -> Tensor:
    backbone, total = model.backbone, torch.zeros((), dtype=torch.float64)
    for ids, (starts, lengths) in zip(*batch(), strict=True):
        if lengths.max() == 1:
            continue
        tokens = backbone.embedding_weight[torch.from_numpy(ids)]
        spans = [tokens[s : s + n] for s, n in zip(starts, lengths, strict=True)]
        units = [
            span[0] if len(span) == 1 else model.module(span[None], torch.tensor([len(span)]))[0]
            for span in spans
        ]
        first = int(np.flatnonzero(lengths > 1)[0])
        chosen = [u for u in range(first, len(units)) if term.rows == "aligned" or lengths[u] == 1]
        if not chosen:
            continue
        ends = [int(starts[u] + lengths[u] - 1) for u in chosen]
        students, teachers = all_states(backbone, torch.stack(units)), all_states(backbone, tokens)
        layers = range(LAYERS) if term.layers == "all" else [LAYERS - 1]
        for layer in layers:
            ours, theirs = students[layer][chosen], teachers[layer][ends].detach()
            scale = theirs.std(correction=0)
            distance = F.mse_loss if term.distance == "mse" else F.smooth_l1_loss
            mean = distance(ours / scale, theirs / scale)  # over rows and hidden size
            total = total + mean * len(chosen) / len(layers)
    return total


def gradient(model: DistillModel, loss: Tensor) -> Tensor:
    parts = torch.autograd.grad(loss, list(model.module.parameters()))
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("terms", TERMS)
def test_terms_and_their_gradient_equal_the_plain_computation(name: str, terms: str) -> None:
    model, bare = model_for(name, TERMS[terms], micro_batch=2), model_for(name)
    found, without = model(*batch()), bare(*batch())
    plain = {term.name: plain_term(model, term) for term in TERMS[terms]}
    close = {"atol": FAMILIES[name], "rtol": FAMILIES[name]}
    assert list(found.hidden) == list(plain)
    for term_name, value in found.hidden.items():
        torch.testing.assert_close(value, plain[term_name].detach(), **close)
        assert float(value) > 1e-3
    weighted = sum(term.weight * plain[term.name] for term in TERMS[terms])
    torch.testing.assert_close(found.total, without.total + weighted, **close)
    wanted = gradient(bare, without.total) + gradient(model, weighted)
    torch.testing.assert_close(gradient(model, found.total), wanted, **close)


def test_states_of_all_layers_leave_the_other_sums_as_they_are() -> None:
    bare, deep = model_for("llama")(*batch()), model_for("llama", TERMS["all"])(*batch())
    assert torch.equal(bare.total, deep.cross_entropy)
    assert torch.equal(bare.cross_entropy, deep.cross_entropy)
    assert torch.equal(bare.kl, deep.kl)
    assert bare.hidden == {}


@pytest.mark.parametrize("terms", TERMS)
def test_a_term_is_zero_where_the_student_is_the_teacher(terms: str) -> None:
    states = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0))
    student = states.clone().requires_grad_()
    raw = torch.tensor([False, True, True, True, False])
    same = AlignedStates(
        (states,) * LAYERS, (student,) * LAYERS, torch.tensor([0, 0, 0, 2, 2]), raw
    )
    for term in TERMS[terms]:
        value = hidden_term(same, term)
        assert float(value.detach()) == 0.0
        assert not torch.autograd.grad(value, student)[0].any()


def test_terms_without_any_merge_are_zero_and_have_their_names() -> None:
    model = model_for("gpt2", TERMS["both"])
    loss: StepLoss = model([np.arange(5)], [(np.arange(5), np.ones(5, dtype=np.int64))])
    assert {name: float(value) for name, value in loss.hidden.items()} == {
        "hidden_all": 0.0,
        "hidden_last": 0.0,
    }


def test_every_sequence_has_its_own_deviation() -> None:
    """Two rows of one sequence, [1, 3] and [5, 7], and one of the sequence after the next."""
    states = torch.tensor([[1.0, 3.0], [0.0, 2.0], [5.0, 7.0]])
    found = deviations(states, torch.tensor([0, 2, 0]))
    assert found.tolist() == pytest.approx([math.sqrt(5), 1.0, math.sqrt(5)])


def test_no_rows_have_no_deviation() -> None:
    assert deviations(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64)).shape == (0,)
