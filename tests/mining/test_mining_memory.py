"""The bound on the memory of mining, against what counting allocates, and tables that grow."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from support.ngram_oracle import chunks_of
from umim_core.config.rule_options import RuleOptions
from umim_core.errors import ResourceLimitError
from umim_core.mining import mining_memory as bounds
from umim_core.mining.counting import count_documents, count_ngrams
from umim_core.mining.hashing import PartitionedCounts, table_bytes
from umim_core.mining.mining_memory import Shares, check_memory, mining_memory, sample_shares
from umim_core.text.token_ids import TOKEN_BITS, segment_borders

LENGTH, CHUNK = 256, 4096


def phrases(tokens: int, seed: int = 1) -> NDArray[np.int32]:
    """Ids of frequent words, in phrases that come back: the share of new n-grams falls."""
    rng = np.random.default_rng(seed)
    known = (rng.zipf(1.2, (20_000, 8)) % 5000).astype(np.int32)
    chosen = rng.zipf(1.1, tokens // 8) % len(known)
    ids: NDArray[np.int32] = known[chosen].reshape(-1)
    return ids


def peak_of(work: object) -> int:
    assert callable(work)
    tracemalloc.start()
    work()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


@pytest.fixture(autouse=True)
def small_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of a quarter."""
    monkeypatch.setattr(bounds, "_SAMPLE_TOKENS", 1 << 17)


@pytest.mark.parametrize(("seed", "longest"), [(1, 4), (2, 4), (1, 16)])
def test_counting_stays_below_the_bound_and_not_far(
    seed: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small chunks, so that the tables and not the buffers are what is measured.
    monkeypatch.setattr(bounds, "CHUNK_TOKENS", CHUNK)
    ids = phrases(1 << 19, seed)
    offsets = segment_borders(len(ids), LENGTH)
    search = RuleOptions(tau=5, longest=longest)
    with chunks_of(CHUNK):
        shares = sample_shares(ids, offsets, search, threads=1)
        bound = mining_memory(len(ids), search, shares, threads=1)
        peak = peak_of(lambda: count_ngrams(ids, offsets, 5, longest=longest, threads=1))
    assert peak > 2e6, "larger than empty tables"
    assert peak < bound < (3 if longest == 4 else 5) * peak


def test_more_than_the_limit_is_refused_and_no_limit_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = phrases(1 << 14)
    offsets, search = segment_borders(len(ids), LENGTH), RuleOptions(tau=5)
    with pytest.raises(ResourceLimitError, match=r"at most 0\.001 GiB of memory; got up to"):
        check_memory(ids, offsets, RuleOptions(max_memory_gib=0.001), threads=1)
    check_memory(ids, offsets, RuleOptions(max_memory_gib=1.0), threads=1)
    monkeypatch.delattr(bounds, "sample_shares")
    check_memory(ids, offsets, search, threads=1)


def test_counting_documents_stays_below_its_bound() -> None:
    ids = phrases(1 << 19)
    offsets, search = segment_borders(len(ids), LENGTH), RuleOptions(min_documents=2)
    ends = np.arange(1, 9) * (len(ids) // 8)
    shares = sample_shares(ids, offsets, search, threads=1)
    bound = mining_memory(len(ids), search, shares, threads=1)

    def count() -> None:
        counts = count_ngrams(ids, offsets, search.tau, threads=1)
        count_documents(ids, offsets, counts.keys, ends, threads=1)

    peak = peak_of(count)
    assert peak < bound < 4 * peak


def test_blocks_limit_the_tables() -> None:
    shares, search = Shares(0.2, 0.05), RuleOptions(tau=5)
    whole = mining_memory(10**9, search, shares, threads=1)
    assert mining_memory(10**9, search, shares, threads=1, at_a_time=10**8) < whole


def partition_of(keys: np.ndarray) -> np.ndarray:
    """The top six bits of the product with the golden ratio, by plain integers."""
    return np.array([((int(key) * 0x9E3779B97F4A7C15) % 2**64) >> 58 for key in keys], np.int64)


def add(table: PartitionedCounts, keys: np.ndarray, *weights: np.ndarray) -> None:
    parts = partition_of(keys)
    for part in np.unique(parts):
        mine = parts == part
        table.add(int(part), keys[mine], *(each[mine] for each in weights))


def test_tables_grow_many_times_and_lose_nothing(rng: np.random.Generator) -> None:
    table, want = PartitionedCounts(), Counter[int]()
    before, growths = table.nbytes, 0
    for _ in range(8):
        keys = rng.integers(0, 200_000, 30_000) << TOKEN_BITS
        add(table, keys)
        want.update(keys.tolist())
        growths += table.nbytes > before
        before = table.nbytes
    assert growths >= 3, "tables grew in several rounds"
    found = [column.tolist() for column in table.frequent(1)]
    assert list(zip(*found, strict=True)) == sorted(want.items())


@pytest.mark.parametrize("distinct", [0, 1000, 26_000, 27_000, 60_000, 150_000])
def test_the_size_follows_its_law_within_one_growth_step(
    distinct: int, rng: np.random.Generator
) -> None:
    table = PartitionedCounts()
    add(table, rng.choice(1 << 40, distinct, replace=False))
    assert len(table) == distinct
    assert 1 / 1.61 <= table.nbytes / table_bytes(distinct) <= 1.61
