"""Finding frequent n-grams with their documents, in one process with several threads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.ngram_oracle import as_dict, by_gram, document_oracle, flat, oracle
from support.token_artifacts import write_documents
from umim_core.errors import CorpusError, RuleSetError
from umim_core.mining.counting import LocalCounter, count_ngrams, find_ngrams
from umim_core.mining.mining_options import MiningOptions
from umim_core.rules.grams import ORDERS, select
from umim_core.text.token_ids import UniformOffsets

SEGMENTS = st.lists(st.lists(st.integers(0, 3), max_size=15), min_size=1, max_size=6)


@given(
    segments=SEGMENTS,
    tau=st.integers(1, 3),
    least=st.integers(1, 3),
    threads=st.integers(1, 4),
    excluded=st.frozensets(st.integers(0, 3), max_size=1),
    data=st.data(),
)
def test_grams_with_their_documents_equal_the_oracle(
    segments: list[list[int]],
    tau: int,
    least: int,
    threads: int,
    excluded: frozenset[int],
    data: st.DataObject,
) -> None:
    ids, offsets = flat(segments)
    inner = data.draw(st.lists(st.integers(0, ids.size), max_size=5).map(sorted))
    ends = np.array([*inner, ids.size], dtype=np.int64)
    counter = LocalCounter(ids, offsets, tuple(excluded), threads=threads)
    counts = find_ngrams(MiningOptions(tau=tau, min_documents=2), counter, ends)
    assert counts.documents is not None
    documents = document_oracle(segments, ends.tolist())
    want = oracle(segments, tau, excluded)
    assert as_dict(counts) == want
    assert by_gram(counts, counts.documents) == {gram: documents[gram] for gram in want}
    kept = {gram: c for gram, c in want.items() if documents[gram] >= least}
    assert as_dict(select(counts, tau, least)) == kept


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_a_recount_is_the_same_for_any_number_of_threads(threads: int, tmp_path: Path) -> None:
    ids = np.random.default_rng(1).integers(0, 6, 1003)
    shards = write_documents(tmp_path, *np.split(ids, [1, 1, 400, 401, 990]))
    offsets = UniformOffsets(9, 1003 // 9)
    segments = ids[: offsets[-1]].reshape(-1, 9).tolist()
    grams = count_ngrams(shards, offsets, 2)
    counter = LocalCounter(shards, offsets, threads=threads)
    support, documents = counter.recount(grams.keys, shards.document_ends())
    assert by_gram(grams, support) == oracle(segments, 2)
    want = document_oracle(segments, shards.document_ends().tolist())
    assert by_gram(grams, documents) == {gram: want[gram] for gram in oracle(segments, 2)}
    alone, none = counter.recount(grams.keys, None)
    assert by_gram(grams, alone) == oracle(segments, 2)
    assert all(none[n].size == 0 for n in ORDERS)


@pytest.mark.parametrize("ends", [None, np.zeros(0, np.int64)])
def test_documents_without_borders_are_refused(ends: np.ndarray | None) -> None:
    ids, offsets = flat([[1, 2]])
    options = MiningOptions(tau=1, min_documents=2)
    with pytest.raises(RuleSetError, match="counting documents needs their borders; got none"):
        find_ngrams(options, LocalCounter(ids, offsets), ends)


def test_document_borders_that_end_too_early_are_refused() -> None:
    ids, offsets = flat([[1, 2, 3, 4]])
    options = MiningOptions(tau=1, min_documents=2)
    with pytest.raises(CorpusError, match="documents must reach token 4"):
        find_ngrams(options, LocalCounter(ids, offsets), np.array([2, 3]))


def test_an_id_out_of_range_is_refused_in_a_thread_too() -> None:
    ids, offsets = np.array([1, 2, 1 << 18, 2]), np.array([0, 4])
    keys = count_ngrams(*flat([[1, 2]]), 1).keys
    with pytest.raises(CorpusError, match=r"0\.\.262143"):
        LocalCounter(ids, offsets, threads=2).recount(keys, None)
