"""Counting in one process against collections.Counter: n-grams, and their documents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.ngram_oracle import (
    Segments,
    as_dict,
    by_gram,
    chunks_of,
    cut,
    document_oracle,
    flat,
    oracle,
)
from support.pairwise import pairwise
from support.token_artifacts import write_documents
from umim_core.config.rule_options import RuleOptions
from umim_core.errors import CorpusError
from umim_core.mining import counting
from umim_core.mining.counting import (
    DocumentCounter,
    LocalCounter,
    OrderCounter,
    count_ngrams,
    document_ranges,
    excluded_mask,
    find_ngrams,
)
from umim_core.mining.hashing import rank_indexes
from umim_core.rules.grams import NgramCounts, select
from umim_core.text.token_ids import MAX_TOKEN_ID, segment_borders

THREADS = [1, 2, 3]
SEGMENTS = st.lists(
    st.lists(st.integers(0, 3) | st.integers(MAX_TOKEN_ID - 1, MAX_TOKEN_ID), max_size=18),
    max_size=6,
)
LENGTHS = st.sampled_from([4, 5, 7, 16])
EXCLUDED = st.frozensets(st.integers(0, 3), max_size=2)


def test_docstring_example() -> None:
    assert as_dict(count_ngrams(*flat([[1, 2, 3, 1, 2]]), 2)) == {(1, 2): 2}


@pairwise(
    tau=[1, 2, 5],
    length=[2, 3, 4, 7, 512],
    base=[0, MAX_TOKEN_ID - 6],
    threads=THREADS,
    longest=[2, 3, 4, 5, 16],
)
def test_equals_counter(
    tau: int, length: int, base: int, threads: int, longest: int, rng: np.random.Generator
) -> None:
    stream = base + np.append(rng.integers(0, 7, 700), np.tile(rng.integers(0, 7, 43), 14))
    borders = np.array(segment_borders(len(stream), length))  # as an array; the other form is below
    ids = stream[: borders[-1]]
    counts = count_ngrams(ids, borders, tau, longest=longest, threads=threads)
    assert as_dict(counts) == oracle(cut(stream, length), tau, longest=longest) != {}
    assert counts.orders == tuple(range(2, max(4, longest) + 1))
    for n in counts.orders:
        assert (counts.ids(n).dtype, counts.support[n].dtype) == (np.int32, np.int64)
        assert counts.ids(n).tolist() == sorted(counts.ids(n).tolist())


@given(
    segments=SEGMENTS,
    tau=st.sampled_from([1, 2, 5]),
    excluded=EXCLUDED,
    threads=st.sampled_from(THREADS),
    chunk_tokens=st.integers(1, 12),
    longest=LENGTHS,
)
def test_equals_counter_on_ragged_segments(
    segments: Segments,
    tau: int,
    excluded: frozenset[int],
    threads: int,
    chunk_tokens: int,
    longest: int,
) -> None:
    options = {"longest": longest, "threads": threads}
    with chunks_of(chunk_tokens):
        got = as_dict(count_ngrams(*flat(segments), tau, excluded, **options))
    assert got == oracle(segments, tau, excluded, longest)


def test_parts_of_a_corpus_may_be_counted_one_after_the_other(rng: np.random.Generator) -> None:
    ids, offsets = rng.integers(0, 9, 900), range(0, 901, 9)
    want = count_ngrams(ids, offsets, 1, longest=8)
    for order in want.orders:  # a worker of a cluster keeps no places
        indexes = rank_indexes(want.keys, order)
        counter = OrderCounter(order, indexes, excluded_mask(()), threads=2, chunk_tokens=30)
        for low, high in ((40, 100), (0, 13), (13, 13), (13, 40)):
            counter.add(ids, offsets, low, high)
        keys, support = counter.frequent(1)
        assert keys.tolist() == want.keys[order].tolist()
        assert support.tolist() == want.support[order].tolist()


# Documents


@given(
    segments=SEGMENTS,
    like=SEGMENTS,
    chunk=st.sampled_from([1, 2, 3, 5, 8, 1 << 20]),
    parts=st.integers(1, 5),
    longest=LENGTHS,
    data=st.data(),
)
def test_documents_by_ranges_equal_the_oracle(
    segments: Segments, like: Segments, chunk: int, parts: int, longest: int, data: st.DataObject
) -> None:
    grams = count_ngrams(*flat(like), 1, longest=longest)  # of another corpus: some may not occur
    ids, offsets = flat(segments)
    inner = data.draw(st.lists(st.integers(0, ids.size), max_size=5).map(sorted))
    ends = np.array([*inner, ids.size], dtype=np.int64)  # some documents are empty
    documents = {n: 0 for n in grams.orders}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "_DOCUMENTS_TOKENS", chunk)
        for bounds in document_ranges(ids.size, ends, parts) or [(0, 0)]:
            one = DocumentCounter(grams.keys)
            one.add(ids, offsets, ends, *bounds)
            documents = {n: documents[n] + one.documents[n] for n in grams.orders}
    want = document_oracle(segments, ends.tolist(), longest)
    got = by_gram(grams, documents)
    assert got == {gram: want.get(gram, 0) for gram in got}


@given(
    segments=SEGMENTS.filter(any),
    tau=st.integers(1, 3),
    more=st.integers(0, 3),
    least=st.integers(1, 3),
    threads=st.integers(1, 4),
    excluded=EXCLUDED,
    longest=LENGTHS,
    data=st.data(),
)
def test_grams_with_their_documents_equal_the_oracle(
    segments: Segments,
    tau: int,
    more: int,
    least: int,
    threads: int,
    excluded: frozenset[int],
    longest: int,
    data: st.DataObject,
) -> None:
    ids, offsets = flat(segments)
    inner = data.draw(st.lists(st.integers(0, ids.size), max_size=5).map(sorted))
    ends = np.array([*inner, ids.size], dtype=np.int64)
    counter = LocalCounter(ids, offsets, tuple(excluded), threads, longest)
    counts = find_ngrams(RuleOptions(tau=tau, min_documents=2), counter, ends)
    assert counts.documents is not None
    documents = document_oracle(segments, ends.tolist(), longest)
    want = oracle(segments, tau, excluded, longest)
    assert as_dict(counts) == want
    assert by_gram(counts, counts.documents) == {gram: documents[gram] for gram in want}
    kept = {g: c for g, c in want.items() if c >= tau + more and documents[g] >= least}
    found = select(counts, tau + more, least)
    assert (as_dict(found), found.tau) == (kept, tau + more)
    assert found.documents is not None
    assert by_gram(found, found.documents) == {gram: documents[gram] for gram in kept}


@pytest.mark.parametrize("threads", [*THREADS, 8])
def test_arrays_maps_and_token_files_give_the_same(
    threads: int, tmp_path: Path, rng: np.random.Generator
) -> None:
    stream = rng.integers(0, 11, 1003).astype(np.uint32)
    np.save(tmp_path / "ids.npy", stream)
    files = write_documents(tmp_path / "files", *np.split(stream, [1, 1, 400, 401, 990]))
    mapped = np.lib.format.open_memmap(tmp_path / "ids.npy", mode="r")
    offsets, segments = segment_borders(1003, 30), cut(stream, 30)  # 13 tokens are left over
    want = oracle(segments, 2)
    documents = document_oracle(segments, files.document_ends().tolist())
    with chunks_of(100):
        for ids in (mapped, files):
            counts = count_ngrams(ids, offsets, 2, threads=threads)
            assert as_dict(counts) == want
            counter = LocalCounter(ids, offsets, threads=threads)
            found = counter.documents_of(counts.keys, files.document_ends())
            assert by_gram(counts, found) == {gram: documents[gram] for gram in want}


# Refusals


def counted_documents(ids: np.ndarray) -> object:
    keys, borders = count_ngrams(*flat([[1, 2]]), 1).keys, np.array([0, ids.size])
    return LocalCounter(ids, borders, threads=2).documents_of(keys, borders[1:])


def counted(ids: object, offsets: object = None, **options: object) -> NgramCounts:
    array = np.asarray(ids)
    borders = np.array([0, array.size] if offsets is None else offsets, dtype=np.int64)
    return count_ngrams(array, borders, 1, **options)


def test_a_threshold_beyond_all_numbers_is_reached_by_nothing() -> None:
    assert len(count_ngrams(*flat([[1, 2, 1, 2]]), 10**30)) == 0


LATE = np.where(np.arange(1000) == 990, MAX_TOKEN_ID + 1, 1)
REFUSED = {
    "negative": (lambda: counted([1, -1]), r"0\.\.262143; got -1 at position 1\. Ch"),
    "large": (lambda: counted([1, 1 << 18]), "got 262144 at position 1"),
    "largest": (lambda: counted(np.array([1, 2**64 - 1], np.uint64)), "184467"),
    "rows": (lambda: counted([[1, 2]]), "one flat array; got 2 dimensions"),
    "floats": (lambda: counted([1.0, 2.5]), "must be integers; got float64"),
    "late": (lambda: counted(LATE, range(0, 1001, 10), threads=3), "got 262144 at position 990"),
    "documents": (lambda: counted_documents(np.array([1, 1 << 18, 2])), r"0\.\.262143"),
    **{
        f"borders {offsets}": (
            lambda offsets=offsets: counted([1, 2, 3], offsets),
            "borders must rise from 0 to 3",
        )
        for offsets in ([], [0], [0, 4], [1, 3], [0, 2, 1, 3], [0, 2])
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_counted_is_refused(case: str) -> None:
    call, message = REFUSED[case]
    with chunks_of(50), pytest.raises(CorpusError, match=message):
        call()
