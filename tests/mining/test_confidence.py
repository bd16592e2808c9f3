"""Confidence rules against runs found token by token, each with a forward of its own."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from support.ngram_oracle import grams_of, named
from support.tiny_models import tiny_model
from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.config.rule_options import AS_FOUND, RuleOptions
from umim_core.errors import CorpusError, EvaluationError, NumericalError
from umim_core.mining.confidence import confidence_counts
from umim_core.rules.grams import ORDERS
from umim_core.rules.ruleset import RuleOrigin, RuleSet
from umim_core.text.token_ids import Offsets, flat

THRESHOLD = 0.02  # a random model of 32 tokens exceeds it in part
SIZES = (20, 1, 0, 13, 2, 30, 27, 3)


def sure_tokens(backbone: Backbone, segment: list[int], threshold: float) -> list[bool]:
    sure = [False][: len(segment)]
    for t in range(1, len(segment)):
        logits = backbone.model(input_ids=torch.tensor([segment[:t]])).logits[0, -1]
        probability = float(torch.softmax(logits.double(), dim=-1)[segment[t]])
        assert abs(probability - threshold) > 1e-6  # no rounding decides a token
        sure.append(probability > threshold)
    return sure


def oracle(
    segments: list[list[int]], sure: list[list[bool]], excluded: set[int]
) -> Counter[tuple[int, ...]]:
    """All maximal runs of any length, by a scan."""
    runs: Counter[tuple[int, ...]] = Counter()
    for segment, flags in zip(segments, sure, strict=True):
        kept = [flag and token not in excluded for token, flag in zip(segment, flags, strict=True)]
        for is_run, places in itertools.groupby(range(len(segment)), kept.__getitem__):
            if is_run:
                runs[tuple(segment[place] for place in places)] += 1
    return runs


@pytest.fixture
def segments(rng: np.random.Generator) -> list[list[int]]:
    return [rng.choice([0, 3, 4, 5, 6, 7], size, p=[0.05, *[0.19] * 5]).tolist() for size in SIZES]


def test_runs_are_those_found_token_by_token(
    tiny_backbone: Backbone, segments: list[list[int]]
) -> None:
    sure = [sure_tokens(tiny_backbone, segment, THRESHOLD) for segment in segments]
    assert any(len(run) > 4 for run in oracle(segments, sure, {0}))  # a longer run to discard
    for excluded, batch_size in itertools.product(({0}, {0, 5}), (1, 3, 100)):
        runs = oracle(segments, sure, excluded)
        expected = {run: count for run, count in runs.items() if len(run) in ORDERS}
        assert len(expected) > 3
        found = confidence_counts(
            tiny_backbone,
            *flat(segments),
            min_probability=THRESHOLD,
            batch_size=batch_size,
            excluded=excluded - {0},
        )
        assert named(*found) == expected


def mine(backbone: Backbone, ids: np.ndarray, offsets: Offsets, **changes: Any) -> RuleSet:
    """Count and filter by other options."""
    found = {"tau": 1, **AS_FOUND, **changes}
    options = RuleOptions(source="confidence", min_probability=THRESHOLD, **found)
    counted = confidence_counts(backbone, ids, offsets, min_probability=THRESHOLD)
    return RuleSet.filtered(*counted, RuleOrigin(options=options))[0]


def test_special_ids_are_in_no_rule_unasked(tiny_llama: Backbone) -> None:
    ids = np.tile([0, 3, 4, 0, 6, 7], 9)
    offsets = np.array([0, len(ids)], dtype=np.int64)
    found = confidence_counts(tiny_llama, ids, offsets, min_probability=1e-9)
    assert named(*found) == {(3, 4): 9, (6, 7): 9}


def test_tau_and_filters_apply_to_the_runs(tiny_llama: Backbone, segments: list[list[int]]) -> None:
    sure = [sure_tokens(tiny_llama, segment, THRESHOLD) for segment in segments]
    runs = oracle(segments, sure, {0})
    twice = {run: n for run, n in runs.items() if len(run) in ORDERS and n >= 2}
    mined = mine(tiny_llama, *flat(segments), tau=2)
    assert grams_of(mined) == twice != {}
    filtered = mine(tiny_llama, *flat(segments), overlap="greedy", containment="drop")
    assert filtered.infix_free
    assert 0 < len(filtered) < len(mined) + sum(1 for n in runs.values() if n == 1)
    assert grams_of(filtered).items() <= runs.items()


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (np.array([1, 32, 2]), CorpusError, r"0\.\.31.*got 32"),
        (np.ones(70, np.int64), EvaluationError, "64 positions"),
    ],
)
def test_ids_that_the_model_cannot_read_are_refused(
    tiny_llama: Backbone, ids: np.ndarray, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        mine(tiny_llama, ids, np.array([0, len(ids)]))


def test_a_model_that_gives_no_numbers_is_refused() -> None:
    backbone = wrap_backbone(tiny_model(), None)
    with torch.no_grad():
        backbone.head_weight.fill_(float("nan"))
    with pytest.raises(NumericalError, match="NaN"):
        mine(backbone, np.arange(5), np.array([0, 5]))
