"""Matching of whole texts and of texts that grow, against plain Python."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.ngram_oracle import units_of
from umim_core.errors import CorpusError
from umim_core.rules.matcher import Matcher, SuffixMatcher, parts_behind, token_reduction
from umim_core.rules.ruleset import RuleSet
from umim_core.text.token_ids import MAX_TOKEN_ID

Spans = set[tuple[int, ...]]
Units = list[tuple[int, int]]
Case = tuple[Spans, list[list[int]]]  # rules and texts
LENGTHS = [(2, 3, 4), (2, 3, 5, 9), (2, 4, 8, 15, 16)]


@st.composite
def spans_and_texts(
    draw: st.DrawFn, texts: int = 1, most_tokens: int = 60
) -> tuple[Spans, list[list[int]]]:
    """Draw spans over a few tokens, and one or more texts."""
    size = draw(st.integers(2, 5))
    low = draw(st.sampled_from([0, 1000, MAX_TOKEN_ID - size + 1]))
    token = st.integers(low, low + size - 1)
    span = st.one_of(*(st.tuples(*[token] * n) for n in draw(st.sampled_from(LENGTHS))))
    spans = draw(st.sets(span, max_size=40))
    pieces = st.tuples(token)
    if spans:
        pieces |= st.builds(
            lambda span, first, end: span[first:end],
            st.sampled_from(sorted(spans)),
            st.integers(0, 3),
            st.integers(1, 16),
        )
    text = st.lists(pieces, max_size=most_tokens).map(
        lambda parts: [token for part in parts for token in part][:most_tokens]
    )
    return spans, draw(st.lists(text, min_size=1, max_size=texts))


@pytest.mark.parametrize("count", [0, 1, 1000, 20_000])
def test_a_rule_of_four_tokens_takes_at_most_41_bytes(count: int) -> None:
    rng = np.random.default_rng(0)
    draws = (rng.integers(0, 5000, rng.integers(2, 5)) for _ in range(count))
    rules = RuleSet.from_spans(tuple(draw.tolist()) for draw in draws)
    assert rules.tables.nbytes <= 16 + 41 * len(rules)


@given(spans=st.sets(st.lists(st.integers(0, 3), min_size=2, max_size=7).map(tuple), max_size=5))
def test_rules_are_infix_free_where_none_lies_inside_another(spans: Spans) -> None:
    inside = any(
        span[i:j] in spans and j - i < len(span)
        for span in spans
        for i, j in combinations(range(len(span) + 1), 2)
    )
    assert RuleSet.from_spans(spans).infix_free is not inside


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


def test_docstring_example() -> None:
    assert segment([1, 2, 3, 1, 2, 4], {(1, 2), (1, 2, 3)}) == [(0, 3), (3, 2), (5, 1)]


@settings(max_examples=100)
@given(case=spans_and_texts())
def test_equals_the_oracle_and_the_listing_of_the_paper(
    case: Case,
) -> None:
    spans, [ids] = case
    assert segment(ids, spans) == units_of(ids, spans) == listing(ids, spans)


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
    assert segment(ids, spans) == units_of(ids, spans)


@settings(max_examples=150)
@given(
    case=spans_and_texts(),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    threads=st.integers(1, 5),
)
def test_many_sequences_are_cut_as_each_one_alone_by_any_threads(
    case: Case, cuts: list[int], threads: int
) -> None:
    spans, [ids] = case
    offsets = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    starts, lengths, borders = Matcher(RuleSet.from_spans(spans)).segment_many(
        np.array(ids, dtype=np.int64), np.array(offsets, dtype=np.int64), threads=threads
    )
    assert starts.dtype == lengths.dtype == borders.dtype == np.int64
    assert len(borders) == len(offsets)
    assert (borders[0], borders[-1]) == (0, len(starts))
    for row, (low, high) in enumerate(pairwise(offsets)):
        units = slice(borders[row], borders[row + 1])
        own = list(zip((starts[units] - low).tolist(), lengths[units].tolist(), strict=True))
        assert own == units_of(ids[low:high], spans)


@pytest.mark.parametrize(
    ("ids", "end", "message"),
    [
        (np.array([1, 1 << 18]), 2, r"lie in 0\.\.262143; got 262144 at position 1"),
        (np.array([-1]), 1, "got -1 at position 0"),
        (np.array([1, 2, 3]), 400, "borders must rise from 0 to 3"),
    ],
)
def test_what_is_no_text_is_refused(ids: np.ndarray, end: int, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        Matcher(RuleSet.from_spans({(1, 2)})).segment_many(ids, np.array([0, end]))


def test_no_text_has_no_reduction() -> None:
    with pytest.raises(CorpusError, match=r"must hold at least one token; got 0\."):
        token_reduction(0, 0)


def test_parts_behind_what_was_dropped_count_from_its_end() -> None:
    parts = ((0, 2), (3, 7), (8, 9))
    assert [parts_behind(parts, n) for n in (4, 7)] == [((0, 3), (4, 5)), ((1, 2),)]
    assert parts_behind(None, 4) is None


Step = tuple[int, tuple[int, ...]]  # units taken back, ids of the new unit


def step(suffixes: SuffixMatcher, tokens: list[int | None]) -> list[Step | None]:
    """Add one token per row; None for a row that gets none."""
    running = np.array([token is not None for token in tokens])
    made = suffixes.advance(np.array([token or 0 for token in tokens], dtype=np.int64), running)
    steps: list[Step | None] = []
    for row, length in enumerate(made.lengths.tolist()):
        assert not made.spans[row, length:].any()
        span = tuple(made.spans[row, :length].tolist())
        steps.append((int(made.rollback[row]), span) if length else None)
        assert length or not made.rollback[row]
    return steps


def followed(rules: Spans, tokens: list[int]) -> list[Step | None]:
    suffixes = Matcher(RuleSet.from_spans(rules)).suffixes(1)
    return [step(suffixes, [token])[0] for token in tokens]


def test_worked_example_of_the_docstring() -> None:
    a, b, c = 0, 1, 2
    assert followed({(b, c)}, [a, b, c]) == [(0, (a,)), (0, (b,)), (1, (b, c))]


def test_a_row_that_rests_goes_on_where_it_was() -> None:
    suffixes = Matcher(RuleSet.from_spans([(3, 4, 5)])).suffixes(2)
    for tokens in ([3, 3], [None, 4], [4, None]):
        step(suffixes, tokens)
    assert step(suffixes, [5, 5]) == [(2, (3, 4, 5)), (2, (3, 4, 5))]


@pytest.mark.parametrize("odd", [MAX_TOKEN_ID + 1, (1 << 18) + 2, 1 << 40, -1])
def test_a_token_that_cannot_be_in_a_rule_is_a_barrier(odd: int) -> None:
    # 0 << 18 | (1 << 18 | 2) would be the key of (1, 2)
    steps = followed({(0, 1), (1, 2), (0, 2), (2, 2), (0, 0)}, [0, odd, 2, 2])
    assert steps == [(0, (0,)), (0, (odd,)), (0, (2,)), (1, (2, 2))]


@given(case=spans_and_texts(texts=4, most_tokens=40))
def test_units_are_the_segmentation_of_the_ids_whatever_the_rules(
    case: Case,
) -> None:
    """After every token."""
    rules, rows = case
    suffixes = Matcher(RuleSet.from_spans(rules)).suffixes(len(rows))
    units: list[list[tuple[int, int]]] = [[] for _ in rows]
    for at in range(max(map(len, rows))):
        steps = step(suffixes, [row[at] if at < len(row) else None for row in rows])
        for row, held, made in zip(rows, units, steps, strict=True):
            if made is not None:
                rollback, span = made
                del held[len(held) - rollback :]
                held.append((at + 1 - len(span), len(span)))
                assert span == tuple(row[at + 1 - len(span) : at + 1])
            seen = min(at + 1, len(row))
            assert held == units_of(row[:seen], rules)
