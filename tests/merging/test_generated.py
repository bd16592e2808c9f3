"""Merging of generated tokens, without a model: worked examples and the segmentation law."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umim_core.merging.generated import GeneratedUnits, Step
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

TOKEN = st.integers(0, 2)
RULES = st.sets(st.lists(TOKEN, min_size=2, max_size=4).map(tuple), max_size=12)


def oracle(ids: list[int], rules: set[tuple[int, ...]]) -> list[tuple[int, int]]:
    """Longest-first, left-to-right matching, spelled out: all units as (start, length)."""
    units, start = [], 0
    while start < len(ids):
        found = [
            n for n in (4, 3, 2) if start + n <= len(ids) and tuple(ids[start : start + n]) in rules
        ]
        length = found[0] if found else 1
        units.append((start, length))
        start += length
    return units


def pushed(rules: set[tuple[int, ...]], tokens: list[int]) -> list[Step]:
    units = GeneratedUnits(Matcher(RuleSet.from_spans(rules)))
    return [units.push(token) for token in tokens]


def test_worked_example_of_the_docstring() -> None:
    a, b, c = 0, 1, 2
    assert pushed({(b, c)}, [a, b, c]) == [Step(0, (a,)), Step(0, (b,)), Step(1, (b, c))]


def test_the_leftmost_boundary_wins_over_a_shorter_rule() -> None:
    assert pushed({(1, 2), (0, 1, 2)}, [0, 1, 2])[-1] == Step(2, (0, 1, 2))


def test_a_merged_unit_is_absorbed_by_a_longer_rule_from_its_start() -> None:
    steps = pushed({(0, 1), (0, 1, 2)}, [0, 1, 2])
    assert steps == [Step(0, (0,)), Step(1, (0, 1)), Step(1, (0, 1, 2))]


def test_no_rule_starts_inside_a_merged_unit() -> None:
    assert pushed({(0, 1), (1, 2)}, [0, 1, 2])[-1] == Step(0, (2,))


def test_without_a_matcher_nothing_is_merged() -> None:
    units = GeneratedUnits(None)
    assert [units.push(0), units.push(0)] == [Step(0, (0,)), Step(0, (0,))]
    assert (units.units, units.spans) == (2, ())


@settings(max_examples=300, deadline=None)
@given(rules=RULES, tokens=st.lists(TOKEN, max_size=24))
def test_units_after_every_token_are_the_segmentation_of_the_generated_ids(
    rules: set[tuple[int, ...]], tokens: list[int]
) -> None:
    matcher = Matcher(RuleSet.from_spans(rules))
    units = GeneratedUnits(matcher)
    held = 0
    for count, token in enumerate(tokens, start=1):
        step = units.push(token)
        held += 1 - step.rollback
        expected = oracle(tokens[:count], rules)
        assert units.spans == tuple((s, n) for s, n in expected if n > 1)
        assert held == units.units == len(expected)
        assert step.span == tuple(tokens[count - len(step.span) : count])
        starts, lengths = matcher.segment(np.array(tokens[:count]))
        assert list(zip(starts.tolist(), lengths.tolist(), strict=True)) == expected


@pytest.mark.parametrize("order", [2, 3, 4])
def test_a_span_may_cover_everything_generated(order: int) -> None:
    span = tuple(range(order))
    assert pushed({span}, list(span))[-1] == Step(order - 1, span)
