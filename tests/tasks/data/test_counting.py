"""The count on Ray against the count in one process, for several block sizes (reliability 35).

The quick set counts on Ray in ``flows/test_full_pipeline.py``.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from tasks.data.counting import ClusterCounter, Corpus, _added, packed_row
from umim_core.errors import ClusterError
from umim_core.mining.counting import count_ngrams
from umim_core.rules.grams import ORDERS, NgramCounts
from umim_core.text.token_ids import MAX_TOKEN_ID

EMPTY = np.zeros(0, dtype=np.int64)


def ragged() -> tuple[np.ndarray, np.ndarray]:
    """Twelve segments of 0 to 39 tokens over the four highest ids, one of them empty."""
    rng = np.random.default_rng(7)
    sizes = rng.integers(0, 40, 12)
    sizes[5] = 0
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return (MAX_TOKEN_ID - rng.integers(0, 4, offsets[-1])).astype(np.int32), offsets


def assert_equal(got: NgramCounts, want: NgramCounts) -> None:
    assert got.tau == want.tau
    assert got.orders == want.orders
    for n in want.orders:
        assert got.keys[n].tolist() == want.keys[n].tolist()
        assert got.support[n].tolist() == want.support[n].tolist()
        assert got.keys[n].dtype == got.support[n].dtype == np.int64


@pytest.mark.full
@pytest.mark.parametrize(("block_tokens", "longest"), [(90, 4), (90, 16), (1 << 21, 6)])
def test_equals_the_count_in_one_process_whatever_the_blocks(
    two_cores: None, block_tokens: int, longest: int
) -> None:
    ids, offsets = ragged()
    ids[60:100] = ids[:40]
    ids[150:190] = ids[:40]
    excluded = np.array([MAX_TOKEN_ID - 2], dtype=np.int64)
    want = count_ngrams(ids, offsets, 2, excluded.tolist(), longest=longest)
    assert all(len(want.keys[n]) > 1 for n in range(2, min(longest, 7)))
    corpus = Corpus(ids, offsets, tuple(excluded.tolist()))
    assert_equal(ClusterCounter(corpus, block_tokens, longest=longest).count(2), want)


@pytest.mark.full
@pytest.mark.parametrize("offsets", [[0], [0, 0, 1, 2]], ids=["no-documents", "short-documents"])
def test_a_corpus_without_ngrams_has_no_counts(two_cores: None, offsets: list[int]) -> None:
    ids = np.full(offsets[-1], 7, dtype=np.int32)
    got = ClusterCounter(Corpus(ids, np.array(offsets, dtype=np.int64))).count(1)
    assert_equal(got, NgramCounts(dict.fromkeys(ORDERS, EMPTY), dict.fromkeys(ORDERS, EMPTY), 1))


SIZES = {2: 3, 3: 2, 4: 1}


def partial_counts(ranges: int) -> list[pa.Table]:
    """The rows of all ranges: range r has everything in r documents."""
    return [
        packed_row({"order": n}, ranges=np.array([r]), documents=np.full(SIZES[n], r))
        for r in range(ranges)
        for n in ORDERS
    ]


def test_ranges_are_added_up_in_any_order() -> None:
    rows = partial_counts(3)
    documents = _added([pa.concat_tables(rows[4:]), *rows[3::-1]], SIZES, 3)
    assert {n: found.tolist() for n, found in documents.items()} == {
        n: [3] * SIZES[n] for n in SIZES
    }


@pytest.mark.parametrize("lost", range(9))
def test_a_range_that_comes_twice_does_not_stand_for_one_that_is_lost(lost: int) -> None:
    rows = partial_counts(3)
    rows[lost] = rows[(lost + 3) % 9]
    with pytest.raises(ClusterError, match=f"ranges must be .* once; .* of {2 + lost % 3}-grams"):
        _added(rows, SIZES, 3)


def test_a_range_that_nobody_asked_for_is_refused() -> None:
    with pytest.raises(ClusterError, match="each of 2 ranges must be counted once"):
        _added(partial_counts(3), SIZES, 2)
