"""The in-process counter against collections.Counter (RELIABILITY 2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umim_core.errors import CorpusError, RuleSetError
from umim_core.rules.counting import (
    MAX_TOKEN_ID,
    ORDERS,
    NgramCounts,
    add_counts,
    count_ngrams,
    cut_segments,
    local_counts,
)

Grams = dict[tuple[int, ...], int]


def oracle(segments: Sequence[Sequence[int]], tau: int, excluded: frozenset[int]) -> Grams:
    counter: Counter[tuple[int, ...]] = Counter()
    for segment in segments:
        for n in (2, 3, 4):
            for start in range(len(segment) - n + 1):
                gram = tuple(segment[start : start + n])
                if not excluded & set(gram):
                    counter[gram] += 1
    return {gram: count for gram, count in counter.items() if count >= tau}


def count(
    segments: Sequence[Sequence[int]], tau: int, excluded: frozenset[int] = frozenset()
) -> NgramCounts:
    flat = np.array([token for segment in segments for token in segment], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum([len(s) for s in segments])]).astype(np.int64)
    return count_ngrams(flat, offsets, tau, excluded)


def as_dict(counts: NgramCounts) -> Grams:
    return {
        tuple(gram): int(support)
        for n in ORDERS
        for gram, support in zip(counts.ids(n).tolist(), counts.support[n], strict=True)
    }


def cut(stream: np.ndarray, length: int) -> list[list[int]]:
    return [
        stream[start : start + length].tolist()
        for start in range(0, len(stream) - length + 1, length)
    ]


def test_docstring_example() -> None:
    assert as_dict(count([[1, 2, 3, 1, 2]], 2)) == {(1, 2): 2}
    assert as_dict(count([[1, 2, 3, 1, 2]], 1)) == {
        (1, 2): 2,
        (2, 3): 1,
        (3, 1): 1,
        (1, 2, 3): 1,
        (2, 3, 1): 1,
        (3, 1, 2): 1,
        (1, 2, 3, 1): 1,
        (2, 3, 1, 2): 1,
    }


@pytest.mark.parametrize("tau", [1, 2, 5])
@pytest.mark.parametrize("length", [2, 3, 4, 7, 512])
@pytest.mark.parametrize("base", [0, MAX_TOKEN_ID - 6], ids=["low-ids", "high-ids"])
def test_equals_counter(tau: int, length: int, base: int, rng: np.random.Generator) -> None:
    stream = base + rng.integers(0, 7, 1300)
    ids, offsets = cut_segments(stream, length)
    got = as_dict(count_ngrams(ids, offsets, tau))
    assert got == oracle(cut(stream, length), tau, frozenset())
    assert got


@settings(max_examples=200, deadline=None)
@given(
    segments=st.lists(
        st.lists(st.one_of(st.integers(0, 3), st.integers(MAX_TOKEN_ID - 1, MAX_TOKEN_ID))),
        max_size=6,
    ),
    tau=st.sampled_from([1, 2, 5]),
    excluded=st.frozensets(st.integers(0, 3), max_size=2),
)
def test_equals_counter_on_ragged_segments(
    segments: list[list[int]], tau: int, excluded: frozenset[int]
) -> None:
    assert as_dict(count(segments, tau, excluded)) == oracle(segments, tau, excluded)


@pytest.mark.parametrize(
    "segments", [[], [[]], [[], [], []], [[5]], [[5], [], [6]], [[5], [5], [5], [5]]]
)
def test_documents_shorter_than_two_tokens_hold_nothing(segments: list[list[int]]) -> None:
    assert as_dict(count(segments, 1)) == {}


def test_an_all_identical_segment_counts_overlapping_occurrences() -> None:
    assert as_dict(count([[9] * 10], 1)) == {(9,) * 2: 9, (9,) * 3: 8, (9,) * 4: 7}


def test_an_all_different_stream_has_no_frequent_gram() -> None:
    assert as_dict(count([list(range(1000))], 2)) == {}


def test_grams_never_cross_a_border() -> None:
    assert as_dict(count([[1, 2], [3, 4]], 1)) == {(1, 2): 1, (3, 4): 1}


def test_special_ids_take_part_in_no_gram(rng: np.random.Generator) -> None:
    segments = rng.integers(0, 4, (20, 30)).tolist()
    grams = as_dict(count(segments, 1, frozenset({0, 3})))
    assert grams == oracle(segments, 1, frozenset({0, 3}))
    assert {token for gram in grams for token in gram} == {1, 2}


def test_rows_rise_and_have_the_documented_types(rng: np.random.Generator) -> None:
    counts = count(rng.integers(0, 9, (4, 200)).tolist(), 1)
    for n in ORDERS:
        rows = counts.ids(n)
        assert rows.dtype == np.int32
        assert counts.support[n].dtype == np.int64
        assert rows.tolist() == sorted(rows.tolist())


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_every_integer_type_gives_the_same_counts(
    dtype: type[np.integer], rng: np.random.Generator
) -> None:
    stream = rng.integers(0, 200, 4000)
    offsets = np.array([0, 4000], dtype=np.int64)
    want = as_dict(count_ngrams(stream, offsets, 1))
    assert as_dict(count_ngrams(stream.astype(dtype), offsets, 1)) == want


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.array([1, -1]), r"token ids must lie in 0\.\.262143; got -1\.\.1\. Check"),
        (np.array([1, 1 << 18]), r"0\.\.262143; got 1\.\.262144"),
        (np.array([1, 2**64 - 1], dtype=np.uint64), r"0\.\.262143; got 1\.\.18446744073709551615"),
        (np.array([[1, 2]]), "one flat array; got 2 dimensions"),
        (np.array([1.0, 2.5]), "must be integers; got float64"),
    ],
)
def test_ids_out_of_range_are_refused(ids: np.ndarray, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        count_ngrams(ids, np.array([0, ids.size], dtype=np.int64), 1)
    with pytest.raises(CorpusError, match=message):
        cut_segments(ids, 2)


@pytest.mark.parametrize("offsets", [[], [0], [0, 4], [1, 3], [0, 2, 1, 3], [0, 2]])
def test_borders_that_do_not_cover_the_ids_are_refused(offsets: list[int]) -> None:
    with pytest.raises(CorpusError, match="borders must rise from 0 to 3"):
        count_ngrams(np.array([1, 2, 3]), np.array(offsets, dtype=np.int64), 1)


@pytest.mark.parametrize("tau", [0, -1])
def test_a_threshold_below_one_is_refused(tau: int) -> None:
    with pytest.raises(RuleSetError, match=f"tau must be at least 1; got {tau}"):
        count([[1, 2]], tau)


def part(key: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    return np.array([key], dtype=np.int64), np.array([number], dtype=np.int64)


def test_the_largest_count_fits() -> None:
    keys, counts = add_counts([part(7, 2**62), part(3, 5), part(7, 2**62 - 1)])
    assert (keys.tolist(), counts.tolist()) == ([3, 7], [5, 2**63 - 1])


@pytest.mark.parametrize(
    "numbers", [[2**62, 2**62], [2**63 - 1, 1], [2**63 - 1] * 2, [2**63 - 1] * 3, [2**62] * 5]
)
def test_a_count_over_the_largest_integer_is_an_error(numbers: list[int]) -> None:
    with pytest.raises(CorpusError, match=r"count must lie in 0\.\.2\^63 - 1; got \d\.\d+e\+\d+"):
        add_counts([part(7, number) for number in numbers])


def test_a_negative_count_is_an_error() -> None:
    with pytest.raises(CorpusError, match=r"0\.\.2\^63 - 1; got -3"):
        add_counts([part(7, -3), part(7, 4)])


@settings(max_examples=50, deadline=None)
@given(
    parts=st.lists(
        st.dictionaries(st.integers(0, 5), st.integers(0, 2**60), max_size=5), max_size=6
    )
)
def test_adding_up_equals_python_sums(parts: list[dict[int, int]]) -> None:
    want: Counter[int] = Counter()
    for one in parts:
        want.update(one)
    keys, counts = add_counts(
        (np.array(list(one), np.int64), np.array(list(one.values()), np.int64)) for one in parts
    )
    assert keys.tolist() == sorted(want)
    assert counts.tolist() == [want[key] for key in sorted(want)]


def test_blocks_add_up_to_the_whole(rng: np.random.Generator) -> None:
    segments = rng.integers(0, 5, (12, 17)).astype(np.int64)
    whole = count(segments.tolist(), 3)
    lower: dict[int, np.ndarray] = {}
    for n in ORDERS:
        blocks = [segments[:1], segments[1:5], segments[5:5], segments[5:]]
        keys, support = add_counts(
            local_counts(
                block.reshape(-1),
                np.arange(len(block) + 1, dtype=np.int64) * 17,
                n,
                lower,
                np.zeros(0, np.int64),
            )
            for block in blocks
        )
        lower[n] = keys[support >= 3]
        assert lower[n].tolist() == whole.keys[n].tolist()
        assert support[support >= 3].tolist() == whole.support[n].tolist()


@pytest.mark.parametrize(("size", "length", "kept"), [(0, 4, 0), (3, 4, 0), (4, 4, 4), (11, 4, 8)])
def test_the_remainder_of_a_stream_is_dropped(size: int, length: int, kept: int) -> None:
    ids, offsets = cut_segments(np.arange(size, dtype=np.uint16), length)
    assert (ids.tolist(), ids.dtype) == (list(range(kept)), np.int32)
    assert offsets.tolist() == list(range(0, kept + 1, length))


@pytest.mark.parametrize("length", [1, 0, -5])
def test_segments_of_less_than_two_tokens_are_refused(length: int) -> None:
    with pytest.raises(CorpusError, match="at least 2 tokens"):
        cut_segments(np.arange(9), length)
