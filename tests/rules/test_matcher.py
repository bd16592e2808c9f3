"""The matcher against a ten-line oracle (reliability 1)."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.span_texts import Spans, spans_and_texts
from umim_core.errors import CorpusError
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.text.token_ids import MAX_TOKEN_ID

Units = list[tuple[int, int]]


def oracle(ids: list[int], spans: Spans) -> Units:
    units, position = [], 0
    while position < len(ids):
        length = 1
        for n in range(16, 1, -1):
            if position + n <= len(ids) and tuple(ids[position : position + n]) in spans:
                length = n
                break
        units.append((position, length))
        position += length
    return units


def listing(ids: list[int], spans: Spans) -> Units:
    """The paper's listing: all matches sorted by start, longer first; taken if nothing overlaps."""
    found = [
        (start, n)
        for n in range(2, 17)
        for start in range(len(ids) - n + 1)
        if tuple(ids[start : start + n]) in spans
    ]
    taken = [False] * len(ids)
    units: Units = []
    for start, n in sorted(found, key=lambda match: (match[0], -match[1])):
        if not any(taken[start : start + n]):
            taken[start : start + n] = [True] * n
            units.append((start, n))
    return sorted(units + [(t, 1) for t in range(len(ids)) if not taken[t]])


def segment(ids: list[int], spans: Spans) -> Units:
    starts, lengths = Matcher(RuleSet.from_spans(spans)).segment(np.array(ids, dtype=np.int64))
    assert starts.dtype == lengths.dtype == np.int64
    return list(zip(starts.tolist(), lengths.tolist(), strict=True))


def rules_and_ids() -> st.SearchStrategy[tuple[list[int], Spans]]:
    return spans_and_texts().map(lambda drawn: (drawn[1][0], drawn[0]))


def test_docstring_example() -> None:
    assert segment([1, 2, 3, 1, 2, 4], {(1, 2), (1, 2, 3)}) == [(0, 3), (3, 2), (5, 1)]


@settings(max_examples=100)
@given(case=rules_and_ids())
def test_equals_the_oracle_and_the_listing_of_the_paper(case: tuple[list[int], Spans]) -> None:
    ids, spans = case
    assert segment(ids, spans) == oracle(ids, spans) == listing(ids, spans)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("longest", [4, 16])
def test_equals_the_oracle_with_thousands_of_rules(seed: int, longest: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, longest + 1, 5000)
    spans = {tuple(rng.integers(0, 40, n).tolist()) for n in lengths}
    ids = rng.integers(0, 45, 5000).tolist()
    for span in sorted(spans)[:500:7]:
        at = int(rng.integers(0, 4900))
        ids[at : at + len(span)] = span
    assert segment(ids, spans) == oracle(ids, spans)


def test_equals_the_oracle_on_every_sequence_over_two_letters() -> None:
    spans: Spans = {(0, 1), (1, 1, 0), (0, 1, 0, 1)}
    for length in range(9):
        for ids in product((0, 1), repeat=length):
            assert segment(list(ids), spans) == oracle(list(ids), spans)


@pytest.mark.parametrize(
    ("ids", "want"),
    [
        ([], []),
        ([7], [(0, 1)]),
        ([7, 8], [(0, 2)]),
        ([7, 8, 9], [(0, 2), (2, 1)]),
        ([7, 8, 9, 9], [(0, 4)]),
        ([7, 7, 8, 9, 9, 7], [(0, 1), (1, 4), (5, 1)]),
    ],
)
def test_a_longer_rule_wins_only_when_it_is_whole(ids: list[int], want: Units) -> None:
    assert segment(ids, {(7, 8), (7, 8, 9, 9)}) == want


def test_no_rules_leave_every_token_alone() -> None:
    assert segment([0, 0, MAX_TOKEN_ID], set()) == [(0, 1), (1, 1), (2, 1)]


@settings(max_examples=100)
@given(case=rules_and_ids(), cuts=st.lists(st.integers(0, 60), max_size=5))
def test_many_sequences_are_cut_as_each_one_alone(
    case: tuple[list[int], Spans], cuts: list[int]
) -> None:
    ids, spans = case
    offsets = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    starts, lengths, borders = Matcher(RuleSet.from_spans(spans)).segment_many(
        np.array(ids, dtype=np.int64), np.array(offsets, dtype=np.int64)
    )
    assert len(borders) == len(offsets)
    assert (borders[0], borders[-1]) == (0, len(starts))
    for row, (low, high) in enumerate(pairwise(offsets)):
        units = slice(borders[row], borders[row + 1])
        own = list(zip((starts[units] - low).tolist(), lengths[units].tolist(), strict=True))
        assert own == oracle(ids[low:high], spans)


@settings(max_examples=100)
@given(
    case=rules_and_ids(),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    threads=st.integers(2, 5),
)
def test_threads_change_nothing(
    case: tuple[list[int], Spans], cuts: list[int], threads: int
) -> None:
    ids = np.array(case[0], dtype=np.int64)
    offsets = np.array([0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)], dtype=np.int64)
    matcher = Matcher(RuleSet.from_spans(case[1]))
    alone = matcher.segment_many(ids, offsets)
    for one, other in zip(alone, matcher.segment_many(ids, offsets, threads=threads), strict=True):
        assert one.dtype == other.dtype == np.int64
        assert np.array_equal(one, other)


def test_read_only_ids_are_segmented_and_left_alone() -> None:
    ids = np.array([1, 2, 3], dtype=np.int32)
    ids.flags.writeable = False
    assert Matcher(RuleSet.from_spans({(1, 2)})).segment(ids)[1].tolist() == [2, 1]
    writable = np.array([1, 2, 3], dtype=np.int32)
    Matcher(RuleSet.from_spans({(1, 2)})).segment(writable)
    assert writable.flags.writeable


@settings(max_examples=100)
@given(case=rules_and_ids(), span=st.lists(st.integers(0, 4), max_size=6))
def test_contains_knows_exactly_the_rules(case: tuple[list[int], Spans], span: list[int]) -> None:
    ids, spans = case
    matcher = Matcher(RuleSet.from_spans(spans))
    assert all(matcher.contains(rule) for rule in spans)
    assert matcher.contains(span) == (tuple(span) in spans)
    for n in range(18):
        assert matcher.contains(ids[:n]) == (tuple(ids[:n]) in spans)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.array([1, 1 << 18]), r"token ids must lie in 0\.\.262143; got 262144 at position 1"),
        (np.array([-1]), "got -1 at position 0"),
        (np.zeros((2, 2), np.int64), "one flat array"),
        (np.zeros(3), "must be integers; got float64"),
    ],
)
def test_ids_that_are_no_token_ids_are_refused(ids: np.ndarray, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        Matcher(RuleSet.from_spans({(1, 2)})).segment(ids)


def test_borders_beyond_the_ids_are_refused() -> None:
    with pytest.raises(CorpusError, match="borders must rise from 0 to 3"):
        Matcher(RuleSet.from_spans({(1, 2)})).segment_many(
            np.array([1, 2, 3]), np.array([0, 400], dtype=np.int64)
        )
