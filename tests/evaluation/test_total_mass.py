"""Scores are likelihoods: they add up to 1 over all texts, and are what generation reports."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import get_args

import numpy as np
import pytest
import torch

from support.engine_matrix import families, module_for, tiny_backbone
from support.ngram_oracle import filtered
from umim_core.backbone.backbone import Backbone
from umim_core.config.form import Merge, UnitPositions
from umim_core.config.rule_options import Containment, Overlap
from umim_core.evaluation.scoring import Request, Scorer
from umim_core.merging import likelihood
from umim_core.merging.decode_states import branch_layout
from umim_core.merging.likelihood import token_log_probs
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.packing import pack_rows
from umim_core.mining.counting import count_ngrams
from umim_core.rules.matcher import Matcher

VOCAB, LENGTH, LIMIT = 3, 5, 16
POLICIES = list(product(get_args(Overlap), get_args(Containment), get_args(UnitPositions)))
TEXTS = [np.array(ids) for ids in product(range(VOCAB), repeat=LENGTH)]


def build(name: str = "llama") -> Backbone:
    return tiny_backbone(families(LIMIT)[name](), VOCAB, torch.float64, "sdpa")


def mined(overlap: Overlap, containment: Containment) -> Matcher:
    """Rules that every policy cuts down differently; all texts hold some."""
    ids = np.random.default_rng(1).choice(VOCAB, 400, p=[0.6, 0.3, 0.1]).astype(np.int32)
    counts = count_ngrams(ids, np.array([0, len(ids)]), 6, longest=5)
    return Matcher(filtered(counts, overlap=overlap, containment=containment))


def mass(log_probs: list[torch.Tensor]) -> float:
    """Sum of the probabilities of all texts; each first token is given with 1 / V."""
    return float(torch.stack([row.sum() for row in log_probs]).exp().sum()) / VOCAB


@pytest.mark.parametrize(("overlap", "containment", "unit_positions"), POLICIES)
def test_the_mass_of_all_texts_is_1(
    overlap: Overlap, containment: Containment, unit_positions: UnitPositions
) -> None:
    backbone, matcher = build(), mined(overlap, containment)
    assert matcher.rules.infix_free is (containment == "drop")
    assert len(matcher.rules) >= 3
    scored = token_log_probs(
        TEXTS, MergedModel(backbone, module_for(backbone, 5), matcher, unit_positions)
    )
    assert mass(scored) == pytest.approx(1.0, abs=1e-9)


def test_states_that_know_what_follows_miss_a_mass_of_1() -> None:
    """The paper's listing: the whole text is cut first, tokens within a span stay raw."""
    backbone, matcher = build(), mined("none", "keep")
    cuts = [matcher.segment(row) for row in TEXTS]
    inputs = [row[:-1] for row in TEXTS]
    shown = []
    for row, (starts, lengths) in zip(TEXTS, cuts, strict=True):
        whole = starts + lengths <= LENGTH - 1  # complete before the last token
        tail = np.arange(starts[~whole].min(initial=LENGTH - 1), len(row) - 1)
        shown.append((
            np.concatenate([starts[whole], tail]),
            np.concatenate([lengths[whole], np.ones_like(tail)]),
        ))  # fmt: skip
    layout = branch_layout(pack_rows(inputs, shown), matcher, "compact")
    inside = ~layout.trunk
    raw = replace(
        layout,
        lengths=layout.lengths.masked_fill(inside, 1),
        surrogate=layout.surrogate.masked_fill(inside, -1),
    )
    scored = likelihood._score_layout(
        TEXTS,
        [1] * len(TEXTS),
        raw,
        MergedModel(backbone, module_for(backbone, 5), None, "compact"),
    )
    assert abs(mass([scores.log_probs for scores in scored]) - 1) > 1e-3


@pytest.mark.parametrize("scope", ["prompt", "all"])
@pytest.mark.parametrize(("overlap", "containment", "unit_positions"), POLICIES)
def test_the_mass_of_all_continuations_is_1_even_where_contexts_are_cut(
    overlap: Overlap, containment: Containment, unit_positions: UnitPositions, scope: Merge
) -> None:
    backbone, matcher = build("gpt2"), mined(overlap, containment)
    scorer = Scorer(
        MergedModel(backbone, module_for(backbone, 5), matcher, unit_positions), scope, LIMIT
    )
    context = np.random.default_rng(2).choice(VOCAB, 60, p=[0.6, 0.3, 0.1])
    continuations = [np.array(ids) for ids in product(range(VOCAB), repeat=3)]
    for length in (4, 19, 60):
        requests = [Request(context[-length:], ids) for ids in continuations]
        found = [score.log_prob for score in scorer.score(requests, 9)]
        assert float(np.exp(found).sum()) == pytest.approx(1.0, abs=1e-9)
