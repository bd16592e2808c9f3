"""Inspection of rule sets against plain Python over the same rules."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.unit_counts import units_of
from umim_core.rules.inspection import Rule, coverage, coverage_curve, top_rules, visible
from umim_core.rules.matcher import Matcher
from umim_core.rules.origin import RuleOrigin
from umim_core.rules.ruleset import RuleSet

Span = tuple[int, ...]
SPANS = st.lists(st.integers(0, 3), min_size=2, max_size=4).map(tuple)
COUNTED = st.dictionaries(SPANS, st.integers(1, 9), max_size=12)
ROWS = st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=1, max_size=4).filter(any)


def ruleset(counted: dict[Span, int]) -> RuleSet:
    rows = {n: sorted(span for span in counted if len(span) == n) for n in (2, 3, 4)}
    return RuleSet(
        {n: np.array(rows[n], np.int32).reshape(-1, n) for n in rows},
        {n: np.array([counted[span] for span in rows[n]], np.int64) for n in rows},
        RuleOrigin(overlap="none", containment="keep"),
    )


def flat(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array([token for row in rows for token in row], np.int32)
    return ids, np.cumsum([0, *map(len, rows)], dtype=np.int64)


def reduction(rows: list[list[int]], spans: Iterable[Span]) -> float:
    tokens = sum(map(len, rows))
    return (tokens - sum(len(units_of(row, spans)) for row in rows)) / tokens


@given(COUNTED, ROWS)
def test_coverage_counts_tokens_segments_and_spans_of_each_order(
    counted: dict[Span, int], rows: list[list[int]]
) -> None:
    found = coverage(*flat(rows), Matcher(ruleset(counted)))
    lengths = [length for row in rows for _, length in units_of(row, counted)]
    assert (found.tokens, found.segments) == (sum(map(len, rows)), len(rows))
    assert found.spans == {n: lengths.count(n) for n in (2, 3, 4)}
    assert found.token_reduction == reduction(rows, counted)
    assert sum(found.shares.values()) == pytest.approx(float(any(found.spans.values())))


@given(st.dictionaries(SPANS, st.integers(1, 99), max_size=20), ROWS)
def test_a_curve_has_the_reduction_by_the_rules_of_some_counts_upwards(
    counted: dict[Span, int], rows: list[list[int]]
) -> None:
    points = coverage_curve(ruleset(counted), *flat(rows))
    found = [point.tau for point in points]
    assert len(found) <= 8
    assert found == sorted({*found} & {*counted.values()})
    assert found[:1] + found[-1:] == sorted(counted.values())[:1] + sorted(counted.values())[-1:]
    for point in points:
        part = [span for span, count in counted.items() if count >= point.tau]
        assert (point.rules, point.token_reduction) == (len(part), reduction(rows, part))


@given(COUNTED, st.integers(0, 14))
def test_top_rules_come_by_count_then_order_then_ids(counted: dict[Span, int], most: int) -> None:
    expected = sorted(counted, key=lambda span: (-counted[span], len(span), span))
    assert top_rules(ruleset(counted), most) == [Rule(s, counted[s]) for s in expected[:most]]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" of the", "·of·the"),
        ("\n\n\tx", "↵↵⇥x"),
        ("é漢", "é漢"),
        ("\x1b[31m", r"\x1b[31m"),
        ("\u202e\r", r"\u202e\r"),
        ("", ""),
    ],
)
def test_visible_text_is_one_line_of_printable_characters(text: str, shown: str) -> None:
    assert visible(text) == shown
