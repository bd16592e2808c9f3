"""Exact counts of given n-grams in one pass, against counting by hand."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.ngram_oracle import by_gram, document_oracle, flat, oracle
from support.token_artifacts import write_documents
from umim_core.errors import CorpusError
from umim_core.mining import counting
from umim_core.mining.counting import Recount, count_ngrams, document_ranges
from umim_core.rules.grams import ORDERS, NgramCounts
from umim_core.text.token_ids import MAX_TOKEN_ID, UniformOffsets

Segments = list[list[int]]
SEGMENTS = st.lists(
    st.lists(st.integers(0, 2) | st.just(MAX_TOKEN_ID), max_size=12), min_size=1, max_size=6
)
CHUNKS = st.sampled_from([1, 2, 3, 5, 8, 1 << 20])


def given_grams(like: Segments) -> NgramCounts:
    """The grams of another corpus: some of them may not occur."""
    return count_ngrams(*flat(like), 1)


def starting_in(segments: Segments, low: int, high: int) -> dict[tuple[int, ...], int]:
    """Count the grams that start in a range of tokens, one position after the other."""
    found: dict[tuple[int, ...], int] = {}
    begin = 0
    for segment in segments:
        for start in range(len(segment)):
            if low <= begin + start < high:
                for n in ORDERS:
                    if start + n <= len(segment):
                        gram = tuple(segment[start : start + n])
                        found[gram] = found.get(gram, 0) + 1
        begin += len(segment)
    return found


def counter(grams: NgramCounts, documents: bool = False) -> Recount:
    return Recount(grams.keys, count_documents=documents)


@given(segments=SEGMENTS, like=SEGMENTS, chunk=CHUNKS, data=st.data())
def test_support_of_ranges_cut_anywhere(
    segments: Segments, like: Segments, chunk: int, data: st.DataObject
) -> None:
    grams = given_grams(like)
    ids, offsets = flat(segments)
    inner = data.draw(st.lists(st.integers(0, ids.size), max_size=4).map(sorted))
    whole = counter(grams)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "_RECOUNT_TOKENS", chunk)
        for low, high in pairwise([0, *inner, ids.size]):
            one = counter(grams)
            for part in (one, whole):
                part.add(ids, offsets, low, high)
            want = starting_in(segments, low, high)
            got = by_gram(grams, one.support)
            assert got == {gram: want.get(gram, 0) for gram in got}
    want = oracle(segments, 1)
    got = by_gram(grams, whole.support)
    assert got == {gram: want.get(gram, 0) for gram in got}
    assert all(whole.documents[n].size == 0 for n in ORDERS)


@given(segments=SEGMENTS, like=SEGMENTS, chunk=CHUNKS, parts=st.integers(1, 5), data=st.data())
def test_documents_of_ranges_cut_at_their_borders(
    segments: Segments, like: Segments, chunk: int, parts: int, data: st.DataObject
) -> None:
    grams = given_grams(like)
    ids, offsets = flat(segments)
    ends = data.draw(st.lists(st.integers(0, ids.size), max_size=5).map(sorted))
    ends = np.array([*ends, ids.size], dtype=np.int64)  # some are empty, some shorter than a gram
    found, support = {n: 0 for n in ORDERS}, {n: 0 for n in ORDERS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "_RECOUNT_TOKENS", chunk)
        for low, high in document_ranges(ends, ids.size, parts) or [(0, 0)]:
            one = counter(grams, documents=True)
            one.add(ids, offsets, low, high, ends)
            found = {n: found[n] + one.documents[n] for n in ORDERS}
            support = {n: support[n] + one.support[n] for n in ORDERS}
    want = document_oracle(segments, ends.tolist())
    got = by_gram(grams, found)
    assert got == {gram: want.get(gram, 0) for gram in got}
    want = oracle(segments, 1)
    assert by_gram(grams, support) == {gram: want.get(gram, 0) for gram in got}


@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_uniform_segments_and_shards_give_the_same(
    chunk: int, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "_RECOUNT_TOKENS", chunk)
    ids = rng.integers(0, 3, 205).astype(np.uint16)
    shards = write_documents(tmp_path, *np.split(ids, [50, 51, 51, 130]))
    uniform = UniformOffsets(10, 20)
    grams = given_grams([ids.tolist()])
    want = counter(grams, documents=True)
    want.add(ids[:200], uniform[:], document_ends=np.array([50, 51, 51, 130, 200]))
    got = counter(grams, documents=True)
    got.add(shards, uniform, document_ends=shards.document_ends())
    for n in ORDERS:
        assert got.support[n].tolist() == want.support[n].tolist()
        assert got.documents[n].tolist() == want.documents[n].tolist()
    assert by_gram(grams, want.support) == {
        **dict.fromkeys(by_gram(grams, want.support), 0),
        **oracle(ids[:200].reshape(20, 10).tolist(), 1),
    }


def test_ids_out_of_range_are_refused() -> None:
    with pytest.raises(CorpusError, match=r"0\.\.262143; got 262144 at position 1"):
        counter(given_grams([[1, 2]])).add(np.array([1, 1 << 18]), np.array([0, 2]))


@pytest.mark.parametrize("ends", [[], [0], [1, 4]])
def test_document_ends_that_do_not_reach_the_tokens_are_refused(ends: list[int]) -> None:
    one = counter(given_grams([[1, 2]]), documents=True)
    with pytest.raises(CorpusError, match="documents must reach token 5"):
        one.add(np.ones(5, np.int32), np.array([0, 5]), document_ends=np.array(ends, np.int64))
