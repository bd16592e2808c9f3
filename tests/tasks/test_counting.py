"""The count on Ray against the count in one process, for several block sizes (RELIABILITY 35)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tasks.cluster import Cluster, ray_cluster
from tasks.counting import count_distributed
from umim_core.rules.counting import MAX_TOKEN_ID, ORDERS, NgramCounts, count_ngrams

EMPTY = np.zeros(0, dtype=np.int64)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_cluster(cpus=2, object_store_bytes=100 << 20) as found:
        yield found


def ragged(seed: int, segments: int, alphabet: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 40, segments)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    ids = rng.integers(0, alphabet, offsets[-1]) + MAX_TOKEN_ID + 1 - alphabet
    return ids.astype(np.int32), offsets


def assert_equal(got: NgramCounts, want: NgramCounts) -> None:
    assert got.tau == want.tau
    for n in ORDERS:
        assert got.keys[n].tolist() == want.keys[n].tolist()
        assert got.support[n].tolist() == want.support[n].tolist()
        assert got.keys[n].dtype == got.support[n].dtype == np.int64


@pytest.mark.parametrize(
    ("tau", "block_tokens"), [(1, 100), (3, 400), (3, 7), (3, 1 << 21), (10_000, 400)]
)
def test_equals_the_count_in_one_process_whatever_the_blocks(
    cluster: Cluster, tau: int, block_tokens: int
) -> None:
    segments = 8 if block_tokens == 7 else 60
    ids, offsets = ragged(tau, segments, 6)
    excluded = np.array([MAX_TOKEN_ID - 2], dtype=np.int64)
    want = count_ngrams(ids, offsets, tau, excluded.tolist())
    assert (len(want.keys[4]) > 0) == (tau < 10_000)
    assert_equal(count_distributed(ids, offsets, tau, excluded, block_tokens), want)


def test_equal_segments_are_counted_as_ragged_ones_are(cluster: Cluster) -> None:
    ids = np.random.default_rng(0).integers(0, 5, 64 * 20).astype(np.int32)
    offsets = np.arange(21, dtype=np.int64) * 64
    want = count_ngrams(ids, offsets, 2)
    assert_equal(count_distributed(ids, offsets, 2, EMPTY, 128), want)


@pytest.mark.parametrize("offsets", [[0], [0, 0, 0], [0, 1], [0, 1, 2]])
def test_a_corpus_without_ngrams_has_no_counts(cluster: Cluster, offsets: list[int]) -> None:
    ids = np.full(offsets[-1], 7, dtype=np.int32)
    got = count_distributed(ids, np.array(offsets, dtype=np.int64), 1, EMPTY)
    assert_equal(got, NgramCounts({n: EMPTY for n in ORDERS}, {n: EMPTY for n in ORDERS}, 1))
