"""Grouping, truncation and counting of scored requests."""

from __future__ import annotations

import numpy as np
import pytest

from support.merged_models import fresh_model
from support.tiny_models import random_backbone
from umim_core.evaluation.scoring import Request, Scorer, _parts
from umim_core.merging.merged_model import MergedModel

LIMIT = 12


def scorer(scope: str, raw_tail: int = 0) -> Scorer:
    backbone = random_backbone("gpt2", vocab_size=20, hidden_size=8, max_position_embeddings=LIMIT)
    merged_model = fresh_model(backbone, [(1, 2), (3, 4, 5), (6, 7, 8, 9)], 0.2)
    return Scorer(merged_model.reading(scope, raw_tail), scope, LIMIT)


def request(context: list[int], continuation: list[int]) -> Request:
    return Request(np.array(context, np.int64), np.array(continuation, np.int64))


def test_answers_to_one_context_share_a_forward_and_keep_their_order() -> None:
    model, forwards = scorer("prompt"), []
    shared = [1, 2, 11, 12, 13, 14, 15]
    requests = [request([1, 3], [4]), *(request(shared, [a, a + 1]) for a in (5, 6, 7))]
    together = model.score(requests, 8, forwards.append)
    assert forwards == [4]
    alone = [scorer("prompt").score([r], 1)[0].log_prob for r in requests]
    assert [s.log_prob for s in together] == pytest.approx(alone, abs=1e-5)


def test_continuations_share_a_row_where_that_costs_less(rng: np.random.Generator) -> None:
    def cost(columns: int) -> float:  # products of a block, and attention
        return 24 * width**2 * columns + 4 * width * columns**2

    joined = 0
    for _ in range(200):
        units, one, two = rng.integers(1, 200, 3).tolist()
        width = int(rng.integers(1, 32))
        together = cost(units + one + two) <= cost(units + one) + cost(units + two)
        assert (len(list(_parts([one, two], 8, units, width, 999))) == 1) == together
        joined += together
    assert 50 < joined < 150


@pytest.mark.parametrize("family", ["mistral", "gpt_neo"])
@pytest.mark.parametrize("wide", [False, True])  # whether an answer is beyond the window
def test_windows_and_positions_bound_what_shares_a_row(family: str, wide: bool) -> None:
    name = "window_size" if family == "gpt_neo" else "sliding_window"
    backbone = random_backbone(family, hidden_size=64, max_position_embeddings=40, **{name: 24})
    model = Scorer(MergedModel.without_merging(backbone), "prompt", 40)
    context = list(range(1, 31 if wide else 13))
    requests = [request(context, [a, *range(1, 7)]) for a in range(9)]
    requests += [request([5, 6], [a, 7]) for a in range(3)]  # these share a row
    together = model.score(requests, 64)
    alone = [model.score([r], 1)[0].log_prob for r in requests]
    assert [s.log_prob for s in together] == pytest.approx(alone, abs=1e-4)


def test_tallies_count_raw_tokens_and_units() -> None:
    model = scorer("prompt")
    model.score([request([1, 2, 3, 4, 5, 10], [1, 2])], 1)
    assert (model.total.context_tokens, model.total.context_units) == (6, 3)
    assert (model.total.tokens, model.total.units) == (8, 5)  # the continuation stays raw
    whole = scorer("all")
    whole.score([request([1, 2, 3, 4, 5, 10], [1, 2])], 1)
    assert (whole.total.tokens, whole.total.units) == (8, 4)


@pytest.mark.parametrize(("raw_tail", "units"), [(2, 4), (4, 5), (5, 6), (9, 6)])
def test_a_raw_tail_counts_as_units(raw_tail: int, units: int) -> None:
    model = scorer("prompt", raw_tail)
    model.score([request([1, 2, 1, 2, 1, 2], [1, 2])], 1)
    assert (model.total.context_tokens, model.total.context_units) == (6, units)
    assert (model.total.tokens, model.total.units) == (8, units + 2)


@pytest.mark.parametrize("length", [LIMIT - 1, LIMIT, LIMIT + 1, LIMIT + 9])
def test_inputs_at_the_limit_are_scored_with_the_last_units(length: int) -> None:
    context = [10 + i % 9 for i in range(length)]  # no rule applies
    for scope in ("prompt", "all"):
        [found] = scorer(scope).score([request(context, [3, 11])], 1)
        [cut] = scorer(scope).score([request(context[-(LIMIT - 1) :], [3, 11])], 1)
        assert found.log_prob == pytest.approx(cut.log_prob, abs=1e-6)


@pytest.mark.parametrize("scope", ["prompt", "all"])
def test_spans_at_the_end_of_a_full_input_stay_within_the_positions(scope: str) -> None:
    for tail in ([6, 7, 8, 9], [9, 6, 7, 8], [5, 1, 2]):
        [found] = scorer(scope).score([request([10] * 30, tail)], 1)
        assert np.isfinite(found.log_prob)
