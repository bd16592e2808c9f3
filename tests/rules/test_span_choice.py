"""Choice of spans by what they save: a worked example, an oracle, bounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from umim_core.errors import ConfigError
from umim_core.mining.span_choice import choose_spans, saved_tokens
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet


def spans_of(rules: RuleSet) -> set[tuple[int, ...]]:
    return {tuple(ids) for part in rules.ids_by_order.values() for ids in part.tolist()}


def test_spans_are_kept_by_the_tokens_that_they_save() -> None:
    """(1, 2, 3) saves 2 tokens thrice; (4, 5) 1 token four times; (1, 2) nothing beside it."""
    ids = np.array([1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 4, 5, 6, 7])
    rules = RuleSet.from_spans([(1, 2), (1, 2, 3), (4, 5), (6, 7)])
    borders = np.array([0, len(ids)])
    assert dict(zip(sorted(spans_of(rules)), [0] * 4, strict=True)).keys() == spans_of(rules)
    assert saved_tokens(rules, ids, borders).tolist() == [0, 4, 1, 6]  # by order, then ids
    assert spans_of(choose_spans(rules, ids, borders, 2)) == {(1, 2, 3), (4, 5)}
    assert spans_of(choose_spans(rules, ids, borders, 9)) == {(1, 2, 3), (4, 5), (6, 7)}


def test_a_span_that_a_longer_one_hides_is_worth_its_raw_rest() -> None:
    """(1, 2, 3) has the highest count x (n - 1), yet two pairs save more than it and one pair."""
    text = [1, 2, 3] * 3 + [1, 2, 4] * 3 + [5, 6] * 3
    rules = RuleSet.from_spans([(1, 2, 3), (1, 2), (5, 6)])
    left = choose_spans(rules, np.array(text), np.array([0, len(text)]), 2)
    assert spans_of(left) == {(1, 2, 3), (1, 2)}


@pytest.mark.parametrize("seed", range(5))
def test_chosen_spans_save_at_least_as_much_as_those_of_the_highest_counts(seed: int) -> None:
    ids = np.random.default_rng(seed).zipf(1.6, 4000) % 12
    borders = np.array([0, 1000, 4000])
    grams = [tuple(ids[i : i + n].tolist()) for n in (2, 3, 4) for i in range(4000 - n + 1)]
    counts = Counter(grams)
    rules = RuleSet.from_spans(counts)
    support = {
        n: np.array([counts[tuple(row)] for row in part.tolist()], dtype=np.int64)
        for n, part in rules.ids_by_order.items()
    }
    chosen = choose_spans(replace(rules, support_by_order=support), ids, borders, 40)
    frequent = RuleSet.from_spans(sorted(counts, key=lambda g: -counts[g] * (len(g) - 1))[:40])
    assert len(chosen) <= 40

    def units(rules: RuleSet) -> int:
        return len(Matcher(rules).segment_many(ids, borders)[0])

    assert units(chosen) <= units(frequent)


def test_no_spans_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        choose_spans(RuleSet.from_spans([(1, 2)]), np.array([1, 2]), np.array([0, 2]), 0)
