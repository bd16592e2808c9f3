"""The record of generated units, without a model: it equals the segmentation of the ids alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from umim_core.inference.rows import GeneratedUnits
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.throughput.throughput import FixedPairs

TOKEN = st.integers(0, 2)
RULES = st.sets(st.lists(TOKEN, min_size=2, max_size=4).map(tuple), max_size=12)


def push(units: GeneratedUnits, *tokens: int | None) -> None:
    """Push one token per row; None for a row that has ended."""
    running = np.array([token is not None for token in tokens])
    units.push(np.array([token or 0 for token in tokens], dtype=np.int64), running)


def test_a_row_outgrows_its_first_buffer() -> None:
    units = GeneratedUnits(Matcher(RuleSet.from_spans([(1, 2)])), rows=2)
    for step in range(300):
        push(units, 0, 1 + step % 2)
    assert units.spans(0) == ()
    assert units.spans(1) == tuple((start, 2) for start in range(0, 300, 2))


def test_fixed_pairs_merge_every_two_tokens() -> None:
    units = GeneratedUnits(FixedPairs(), rows=2)
    for tokens in ((7, 7), (7, None), (8, 9), (9, 9), (7, None)):
        push(units, *tokens)
    assert [units.spans(row) for row in (0, 1)] == [((0, 2), (2, 2)), ((0, 2),)]


@given(rules=RULES, rows=st.lists(st.lists(TOKEN, max_size=24), min_size=1, max_size=4))
def test_units_after_every_token_are_the_segmentation_of_the_generated_ids(
    rules: set[tuple[int, ...]], rows: list[list[int]]
) -> None:
    matcher = Matcher(RuleSet.from_spans(rules))
    units = GeneratedUnits(matcher, len(rows))
    for step in range(max(map(len, rows))):
        push(units, *(row[step] if step < len(row) else None for row in rows))
        for b, row in enumerate(rows):
            starts, lengths = matcher.segment(np.array(row[: step + 1], dtype=np.int64))
            found = zip(starts.tolist(), lengths.tolist(), strict=True)
            assert units.spans(b) == tuple((s, n) for s, n in found if n > 1)
