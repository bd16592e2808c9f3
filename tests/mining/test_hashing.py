"""Hash tables of packed keys: counts that grow, and indexes of ranks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from umim_core.errors import CorpusError
from umim_core.mining.hashing import PartitionedCounts, table_bytes
from umim_core.text.token_ids import TOKEN_BITS

LARGEST = 2**63 - 1


def partition_of(keys: np.ndarray) -> np.ndarray:
    """The top six bits of the product with the golden ratio, by plain integers."""
    return np.array([((int(key) * 0x9E3779B97F4A7C15) % 2**64) >> 58 for key in keys], np.int64)


def add(table: PartitionedCounts, keys: np.ndarray, weights: np.ndarray | None = None) -> None:
    parts = partition_of(keys)
    for part in np.unique(parts):
        mine = parts == part
        if weights is None:
            table.add(int(part), keys[mine])
        else:
            table.add(int(part), keys[mine], weights[mine])


def content(table: PartitionedCounts, tau: int = 1) -> dict[int, int]:
    keys, counts = table.frequent(tau)
    assert keys.tolist() == sorted(keys.tolist())
    return dict(zip(keys.tolist(), counts.tolist(), strict=True))


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
    assert content(table) == want


@pytest.mark.parametrize("last", [[1], None, [LARGEST]])
def test_a_count_over_the_largest_integer_is_an_error(last: list[int] | None) -> None:
    table = PartitionedCounts()
    add(table, np.array([7]), np.array([LARGEST]))
    with pytest.raises(CorpusError, match=r"must lie in 0\.\.2\^63 - 1; got key 7 passes it"):
        add(table, np.array([7]), None if last is None else np.array(last))


@pytest.mark.parametrize("distinct", [0, 1000, 26_000, 27_000, 60_000, 150_000])
def test_the_size_follows_its_law_within_one_growth_step(
    distinct: int, rng: np.random.Generator
) -> None:
    table = PartitionedCounts()
    add(table, rng.choice(1 << 40, distinct, replace=False))
    assert len(table) == distinct
    assert 1 / 1.61 <= table.nbytes / table_bytes(distinct) <= 1.61
