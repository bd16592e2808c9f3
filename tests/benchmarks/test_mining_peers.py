"""Every peer of the mining benchmark finds the grams of a plain loop."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.peers import mining_peers as peers
from benchmarks.peers.mining_peers import Grams
from support.ngram_oracle import oracle
from umim_core.rules.grams import ORDERS

TAU = 3


def naive(rows: np.ndarray, tau: int) -> Grams:
    """Count gram by gram, in the form of the peers."""
    counts, found = oracle(rows.tolist(), tau), {}
    for n in ORDERS:
        kept = sorted(gram for gram in counts if len(gram) == n)
        support = np.array([counts[gram] for gram in kept], np.int64)
        found[n] = np.array(kept, np.int64).reshape(-1, n), support
    return found


def grams(peer: str, rows: np.ndarray, tau: int) -> Grams:
    """Run one peer and read its result."""
    bits = peers.id_bits(int(rows.max()))
    if peer == "columns":
        return peers.grams_of_columns(peers.duckdb_columns(rows, tau))
    if peer == "tuples":
        return peers.grams_of_tuples(peers.counter_tuples(rows, tau))
    if peer == "integers":
        return peers.grams_of_integers(peers.counter_packed(rows, bits, tau), bits)
    return peers.grams_of_packed(getattr(peers, peer)(rows, bits, tau), bits)


PEERS = ("columns", "duckdb_packed", "duckdb_apriori", "polars_groups", "tuples", "integers")


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("vocabulary", [1, 3, 5])
def test_a_peer_finds_what_a_plain_loop_finds(
    peer: str, vocabulary: int, rng: np.random.Generator
) -> None:
    rows = rng.integers(0, vocabulary, (60, 16), dtype=np.int32)
    expected = naive(rows, TAU)
    assert len(expected[4][0])
    assert peers.same(grams(peer, rows, TAU), expected)
