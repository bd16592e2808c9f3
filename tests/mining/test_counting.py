"""Counting in one process against collections.Counter: n-grams, and their documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
    named,
    oracle,
)
from support.pairwise import pairwise
from support.token_artifacts import write_documents
from umim_core.errors import CorpusError
from umim_core.mining import counting
from umim_core.mining.counting import (
    OrderCounter,
    count_documents,
    count_ngrams,
    excluded_mask,
)
from umim_core.mining.hashing import rank_indexes
from umim_core.text.token_ids import MAX_TOKEN_ID, flat, segment_borders

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


def test_parts_of_a_corpus_may_be_counted_one_after_the_other(rng: np.random.Generator) -> None:
    ids, offsets = rng.integers(0, 9, 900), range(0, 901, 9)
    want = count_ngrams(ids, offsets, 1, longest=8)
    for order in want.orders:  # a worker of a cluster keeps no places
        indexes = rank_indexes(want.keys, order)
        counter = OrderCounter(order, indexes, excluded_mask(()), threads=2)
        with chunks_of(30):
            for low, high in ((40, 100), (0, 13), (13, 13), (13, 40)):
                counter.add(ids, offsets, low, high)
        keys, support = counter.frequent(1)
        assert keys.tolist() == want.keys[order].tolist()
        assert support.tolist() == want.support[order].tolist()


@given(
    segments=SEGMENTS,
    tau=st.sampled_from([1, 2, 3, 5]),
    more=st.integers(0, 3),
    least=st.integers(1, 3),
    threads=st.integers(1, 4),
    excluded=EXCLUDED,
    chunk=st.sampled_from([1, 2, 3, 5, 8, 1 << 20]),
    longest=LENGTHS,
    data=st.data(),
)
def test_grams_of_ragged_segments_and_their_documents_equal_the_oracle(
    segments: Segments,
    tau: int,
    more: int,
    least: int,
    threads: int,
    excluded: frozenset[int],
    chunk: int,
    longest: int,
    data: st.DataObject,
) -> None:
    ids, offsets = flat(segments)
    inner = data.draw(st.lists(st.integers(0, ids.size), max_size=5).map(sorted))
    ends = np.array([*inner, ids.size], dtype=np.int64)
    with chunks_of(chunk):
        counts = count_ngrams(ids, offsets, tau, excluded, longest=longest, threads=threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "_DOCUMENTS_TOKENS", chunk)
        found = count_documents(ids, offsets, counts.keys, ends, threads)
        counts = replace(counts, documents=found)
    documents = document_oracle(segments, ends.tolist(), longest)
    want = oracle(segments, tau, excluded, longest)
    assert as_dict(counts) == want
    assert by_gram(counts, counts.documents) == {gram: documents[gram] for gram in want}
    kept = {g: c for g, c in want.items() if c >= tau + more and documents[g] >= least}
    assert named(*counts.frequent(tau + more, least)) == kept
    shorter = {gram: count for gram, count in kept.items() if len(gram) <= 4}
    assert named(*counts.frequent(tau + more, least, longest=4)) == shorter


def test_maps_and_token_files_give_the_same(tmp_path: Path, rng: np.random.Generator) -> None:
    stream = rng.integers(0, 11, 1003).astype(np.uint32)
    np.save(tmp_path / "ids.npy", stream)
    files = write_documents(tmp_path / "files", *np.split(stream, [1, 1, 400, 401, 990]))
    mapped = np.lib.format.open_memmap(tmp_path / "ids.npy", mode="r")
    offsets, segments = segment_borders(1003, 30), cut(stream, 30)  # 13 tokens are left over
    want = oracle(segments, 2)
    documents = document_oracle(segments, files.ends.tolist())
    with chunks_of(100):
        for ids in (mapped, files.ids):
            counts = count_ngrams(ids, offsets, 2, threads=8)
            assert as_dict(counts) == want
            found = count_documents(ids, offsets, counts.keys, files.ends, threads=8)
            assert by_gram(counts, found) == {gram: documents[gram] for gram in want}


def test_a_threshold_beyond_all_numbers_is_reached_by_nothing() -> None:
    assert len(count_ngrams(*flat([[1, 2, 1, 2]]), 10**30)) == 0


LATE = np.where(np.arange(1000) == 990, MAX_TOKEN_ID + 1, 1)
REFUSED = [
    (np.array([1, 2**64 - 1], np.uint64), [0, 2], "184467"),
    (np.array([[1, 2]]), [0, 2], "one flat array; got 2 dimensions"),
    (np.array([1.0, 2.5]), [0, 2], "must be integers; got float64"),
    (LATE, range(0, 1001, 10), "got 262144 at position 990"),
    *((np.arange(3), borders, "rise from 0 to 3") for borders in ([], [0], [1, 3], [0, 2, 1, 3])),
]


@pytest.mark.parametrize(("ids", "borders", "message"), REFUSED)
def test_what_cannot_be_counted_is_refused(
    ids: np.ndarray, borders: Sequence[int], message: str
) -> None:
    with chunks_of(50), pytest.raises(CorpusError, match=message):
        count_ngrams(ids, np.array(borders, dtype=np.int64), 1, threads=3)
    keys, ends = count_ngrams(*flat([[1, 2]]), 1).keys, np.array([1000])
    with pytest.raises(CorpusError, match=r"0\.\.262143"):
        count_documents(LATE, range(0, 1001, 10), keys, ends, threads=2)
