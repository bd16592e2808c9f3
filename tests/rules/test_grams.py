"""Packed grams, their selection, and the checks of inputs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from support.ngram_oracle import document_oracle, flat
from umim_core.errors import CorpusError, RuleSetError
from umim_core.mining.counting import count_ngrams
from umim_core.rules.grams import ORDERS, NgramCounts, select
from umim_core.text.token_ids import TOKEN_BITS, read_ids

SEGMENTS = [[1, 2, 3, 1, 2], [1, 2, 3, 9], [1, 2], [2, 3, 1, 2, 3, 1]]
ENDS = [5, 11, 17]


def counted(tau: int = 1) -> NgramCounts:
    """SEGMENTS with documents; the second one ends with the third segment."""
    counts = count_ngrams(*flat(SEGMENTS), tau)
    found = document_oracle(SEGMENTS, ENDS)
    documents = {
        n: np.array([found[tuple(gram)] for gram in counts.ids(n).tolist()], dtype=np.int64)
        for n in ORDERS
    }
    return NgramCounts(counts.keys, counts.support, tau, documents)


def test_a_key_is_the_rank_of_the_prefix_and_the_last_token() -> None:
    counts = count_ngrams(*flat([[7, 8, 9, 8, 9, 6]]), 1)
    assert counts.ids(2).tolist() == [[7, 8], [8, 9], [9, 6], [9, 8]]
    assert counts.keys[2].tolist() == [(a << TOKEN_BITS) | b for a, b in counts.ids(2).tolist()]
    assert counts.ids(3).tolist() == [[7, 8, 9], [8, 9, 6], [8, 9, 8], [9, 8, 9]]
    ranks = (0, 1, 1, 3)
    pairs = zip(ranks, (9, 6, 8, 9), strict=True)
    assert counts.keys[3].tolist() == [(rank << TOKEN_BITS) | token for rank, token in pairs]
    assert len(counts) == 4 + 4 + 3


@pytest.mark.parametrize(
    ("documents", "tau", "least", "message"),
    [
        (True, 2, 1, "tau must be at least 3, the threshold of the counts"),
        (True, 3, 0, "min_documents must be 1, or above .*; got 0"),
        (True, 3, -1, "min_documents must be 1, or above .*; got -1"),
        (False, 3, 2, r"where documents were counted; got 2\. Count"),
    ],
)
def test_what_was_not_counted_cannot_be_asked_for(
    documents: bool, tau: int, least: int, message: str
) -> None:
    counts = counted(3)
    with pytest.raises(RuleSetError, match=message):
        select(counts if documents else replace(counts, documents=None), tau, least)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int32, np.int64, np.uint64])
def test_ids_are_read_as_one_type_and_cannot_be_written(dtype: type[np.integer]) -> None:
    ids = np.array([5, 6, 7, 8], dtype=dtype)
    got = read_ids(ids, 1, 3)
    assert (got.tolist(), got.dtype) == ([6, 7], np.int32)
    assert not got.flags.writeable
    assert ids.flags.writeable, "the array itself stays as it was"


def test_ids_that_do_not_lie_side_by_side_are_read_too() -> None:
    got = read_ids(np.arange(10, dtype=np.int32)[::2], 1, 4)
    assert got.tolist() == [2, 4, 6]
    assert got.flags.c_contiguous


@pytest.mark.parametrize(("low", "high", "found"), [(2, 6, "3 of 4"), (5, 7, "0 of 2")])
def test_ids_that_are_missing_are_not_taken_for_the_end(low: int, high: int, found: str) -> None:
    message = f"tokens {low} to {high} of the corpus must be there; got {found}. On a shared file"
    with pytest.raises(CorpusError, match=message):
        read_ids(np.arange(5, dtype=np.int32), low, high)
