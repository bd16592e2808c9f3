from __future__ import annotations

import numpy as np
import pytest

from benchmarks.peers import mining_peers as peers
from benchmarks.peers.mining_peers import Grams
from support.ngram_oracle import oracle
from umim_core.mining.counting import count_ngrams
from umim_core.rules.grams import ORDERS
from umim_core.text.token_ids import UniformOffsets

TAU = 3


def naive(rows: np.ndarray, tau: int, bits: int) -> Grams:
    """Count gram by gram, in the form of the peers."""
    counts, grams = oracle(rows.tolist(), tau), {}
    for n in ORDERS:
        of_order = [gram for gram in counts if len(gram) == n]
        keys = [sum(id_ << bits * (n - 1 - at) for at, id_ in enumerate(gram)) for gram in of_order]
        grams[n] = np.array(keys, np.uint64), np.array([counts[gram] for gram in of_order])
    return grams


PEERS = ("duckdb_packed", "duckdb_apriori", "polars_groups", "counter_packed", "ours")


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("vocabulary", [1, 3, 5])
def test_a_peer_finds_what_a_plain_loop_finds(
    peer: str, vocabulary: int, rng: np.random.Generator
) -> None:
    rows = rng.integers(0, vocabulary, (60, 16), dtype=np.int32)
    bits = peers.id_bits(int(rows.max()))
    expected = naive(rows, TAU, bits)
    assert len(expected[4][0])
    if peer == "ours":
        counts = count_ngrams(rows.ravel(), UniformOffsets(rows.shape[1], len(rows)), TAU)
        grams = peers.grams_of_counts(counts, bits)
    else:
        counted = getattr(peers, peer)(rows, bits, TAU)
        grams = peers.grams_of_integers(counted) if peer == "counter_packed" else counted
    assert peers.same(grams, expected)
