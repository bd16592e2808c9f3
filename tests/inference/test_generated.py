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


@given(
    rules=RULES,
    prompt=st.lists(TOKEN, min_size=1, max_size=8),
    tokens=st.lists(TOKEN, min_size=1, max_size=12),
)
def test_with_an_open_border_prompt_and_tokens_are_cut_as_one_text(
    rules: set[tuple[int, ...]], prompt: list[int], tokens: list[int]
) -> None:
    matcher = Matcher(RuleSet.from_spans(rules))
    units = GeneratedUnits(matcher, 1)
    given_ids = np.array(prompt, dtype=np.int64)
    cut = matcher.segment(given_ids)
    units.open_border([(given_ids, cut)])
    for step, token in enumerate(tokens, start=1):
        push(units, token)
        whole = matcher.segment(np.array(prompt + tokens[:step], dtype=np.int64))
        found = [(int(s) - len(prompt), int(n)) for s, n in zip(*whole, strict=True)]
        behind = [(start, length) for start, length in found if start + length > 0]
        assert units.spans(0) == tuple((start, length) for start, length in behind if length > 1)
        kept = len(cut[0]) - units.taken_from_prompt(0)
        assert kept == len(found) - len(behind)
        assert [(int(s) - len(prompt), int(n)) for s, n in zip(*cut, strict=True)][:kept] == (
            found[:kept]
        )
