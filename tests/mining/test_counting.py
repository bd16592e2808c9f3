"""The in-process counter against collections.Counter (reliability 2)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.ngram_oracle import Segments, as_dict, chunks_of, cut, flat, oracle
from support.token_artifacts import write_documents
from umim_core.errors import CorpusError, RuleSetError
from umim_core.mining.counting import (
    OrderCounter,
    count_ngrams,
    excluded_mask,
    segment_ranges,
)
from umim_core.rules.grams import ORDERS, NgramCounts
from umim_core.text.token_ids import MAX_TOKEN_ID, UniformOffsets, cut_segments

THREADS = [1, 2, 3]
any_threads = pytest.mark.parametrize("threads", THREADS)


def count(
    segments: Segments,
    tau: int,
    excluded: frozenset[int] = frozenset(),
    threads: int | None = None,
) -> NgramCounts:
    ids, offsets = flat(segments)
    return count_ngrams(ids, offsets, tau, excluded, threads=threads)


@any_threads
def test_docstring_example(threads: int) -> None:
    how = {"threads": threads}
    assert as_dict(count([[1, 2, 3, 1, 2]], 2, **how)) == {(1, 2): 2}
    assert as_dict(count([[1, 2, 3, 1, 2]], 1, **how)) == {
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
@any_threads
def test_equals_counter(
    tau: int, length: int, base: int, threads: int, rng: np.random.Generator
) -> None:
    stream = base + rng.integers(0, 7, 1300)
    ids, offsets = cut_segments(stream, length)
    got = as_dict(count_ngrams(ids, offsets, tau, threads=threads))
    assert got == oracle(cut(stream, length), tau)
    assert got


@given(
    segments=st.lists(
        st.lists(st.one_of(st.integers(0, 3), st.integers(MAX_TOKEN_ID - 1, MAX_TOKEN_ID))),
        max_size=6,
    ),
    tau=st.sampled_from([1, 2, 5]),
    excluded=st.frozensets(st.integers(0, 3), max_size=2),
    threads=st.sampled_from(THREADS),
    chunk_tokens=st.integers(1, 12),
)
def test_equals_counter_on_ragged_segments(
    segments: list[list[int]],
    tau: int,
    excluded: frozenset[int],
    threads: int,
    chunk_tokens: int,
) -> None:
    with chunks_of(chunk_tokens):
        got = as_dict(count(segments, tau, excluded, threads))
    assert got == oracle(segments, tau, excluded)


@pytest.mark.parametrize(
    "segments", [[], [[]], [[], [], []], [[5]], [[5], [], [6]], [[5], [5], [5], [5]]]
)
@any_threads
def test_segments_shorter_than_two_tokens_hold_nothing(
    segments: list[list[int]], threads: int
) -> None:
    assert as_dict(count(segments, 1, threads=threads)) == {}


def test_an_all_identical_segment_counts_overlapping_occurrences() -> None:
    assert as_dict(count([[9] * 10], 1)) == {(9,) * 2: 9, (9,) * 3: 8, (9,) * 4: 7}


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


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.array([1, -1]), r"token ids must lie in 0\.\.262143; got -1 at position 1\. Check"),
        (np.array([1, 1 << 18]), r"0\.\.262143; got 262144 at position 1"),
        (np.array([1, 2**64 - 1], dtype=np.uint64), r"0\.\.262143; got 18446744073709551615 at"),
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


@pytest.mark.parametrize(("size", "length", "kept"), [(0, 4, 0), (3, 4, 0), (4, 4, 4), (11, 4, 8)])
def test_the_remainder_of_a_stream_is_dropped(size: int, length: int, kept: int) -> None:
    ids, offsets = cut_segments(np.arange(size, dtype=np.uint16), length)
    assert (ids.tolist(), ids.dtype) == (list(range(kept)), np.int32)
    assert offsets.tolist() == list(range(0, kept + 1, length))


@pytest.mark.parametrize("length", [1, 0, -5])
def test_segments_of_less_than_two_tokens_are_refused(length: int) -> None:
    with pytest.raises(CorpusError, match="at least 2 tokens"):
        cut_segments(np.arange(9), length)


@any_threads
def test_many_chunks_per_thread_lose_nothing(threads: int, rng: np.random.Generator) -> None:
    stream = rng.integers(0, 9, 2003)
    ids, offsets = cut_segments(stream, 7)
    for tokens in (1, 8, 50, 700):
        assert len(list(segment_ranges(offsets, tokens))) > threads or tokens == 700
        with chunks_of(tokens):
            got = as_dict(count_ngrams(ids, offsets, 2, threads=threads))
        assert got == oracle(cut(stream, 7), 2)


def test_parts_of_a_corpus_may_be_counted_one_after_the_other(rng: np.random.Generator) -> None:
    ids, offsets = cut_segments(rng.integers(0, 9, 900), 9)
    want = count_ngrams(ids, offsets, 1, max_order=2)
    counter = OrderCounter(2, {}, excluded_mask(()), threads=2, chunk_tokens=30)
    for low, high in ((40, 100), (0, 13), (13, 13), (13, 40)):
        counter.add(ids, offsets, low, high)
    keys, support = counter.frequent(1)
    assert keys.tolist() == want.keys[2].tolist()
    assert support.tolist() == want.support[2].tolist()


def test_the_longest_order_can_be_lowered(rng: np.random.Generator) -> None:
    segments = rng.integers(0, 4, (3, 50)).tolist()
    ids, offsets = flat(segments)
    for longest in ORDERS:
        got = count_ngrams(ids, offsets, 2, max_order=longest)
        want = {gram: c for gram, c in oracle(segments, 2).items() if len(gram) <= longest}
        assert as_dict(got) == want
    with pytest.raises(RuleSetError, match="order must be 2, 3 or 4; got 5"):
        count_ngrams(ids, offsets, 2, max_order=5)


@any_threads
def test_memory_mapped_ids_and_shards_give_the_same_counts(
    threads: int, tmp_path: Path, rng: np.random.Generator
) -> None:
    stream = rng.integers(0, 11, 1000).astype(np.uint32)
    np.save(tmp_path / "ids.npy", stream)
    shards = write_documents(tmp_path / "shards", *np.split(stream, range(64, len(stream), 64)))
    mapped = np.lib.format.open_memmap(tmp_path / "ids.npy", mode="r")
    want = oracle(cut(stream, 30), 2)  # 10 tokens are left over
    with chunks_of(100):
        for ids in (mapped, shards):
            got = count_ngrams(ids, UniformOffsets(30, 33), 2, threads=threads)
            assert as_dict(got) == want


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_an_id_out_of_range_in_a_late_chunk_is_refused(threads: int) -> None:
    ids = np.ones(1000, dtype=np.int64)
    ids[990] = MAX_TOKEN_ID + 1
    with (
        chunks_of(50),
        pytest.raises(CorpusError, match=r"0\.\.262143; got 262144 at position 990"),
    ):
        count_ngrams(ids, UniformOffsets(10, 100), 1, threads=threads)
