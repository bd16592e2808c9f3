"""Hash tables of packed n-grams: counts that grow by partition, and read-only indexes of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Final

import numpy as np

from umim_core.mining.kernel import EMPTY, PARTITIONS, collect, insert
from umim_core.text.token_ids import Ints

NO_WEIGHTS: Final = np.zeros(0, dtype=np.int64)
_FIRST_CAPACITY: Final = 512
_MAX_LOAD: Final = 0.8
_GROWTH: Final = 1.4
_INDEX_LOAD: Final = 0.5
_MOST: Final = 2**63 - 1  # no count is larger
BYTES_PER_PAIR: Final = 16


class PartitionedCounts:
    """Count packed keys, spread over partitions that can be filled by different threads."""

    def __init__(self) -> None:
        self._entries = [_empty_pairs(_FIRST_CAPACITY) for _ in range(PARTITIONS)]
        self._used = [0] * PARTITIONS

    def __len__(self) -> int:
        return sum(self._used)

    @property
    def nbytes(self) -> int:
        return sum(entries.nbytes for entries in self._entries)

    def add(self, partition: int, keys: Ints, weights: Ints = NO_WEIGHTS) -> None:
        """Add keys [K] of one partition, repeated or not; each counts 1, or its weight [K]."""
        begin = 0
        while True:
            entries = self._entries[partition]
            limit = _limit(entries.size // 2)
            begin, self._used[partition] = insert(
                keys, weights, entries, self._used[partition], limit, begin
            )
            if begin == keys.size:
                return
            larger = _empty_pairs(_grown(entries.size // 2))
            insert(*self.items(partition), larger, 0, larger.size, 0)
            self._entries[partition] = larger

    def reserve(self, partition: int, keys: int) -> None:
        """Make room for so many keys in an empty partition.

        Needed before :meth:`items` of other tables are added: they come in the order of their
        slots, and into a table that grows meanwhile they would pile up in one stretch (60 times
        as slow on 8 million keys).
        """
        self._entries[partition] = _empty_pairs(max(_FIRST_CAPACITY, int(keys / _MAX_LOAD) + 1))

    def items(self, partition: int, tau: int = 1) -> tuple[Ints, Ints]:
        """Return keys and counts of a partition that reach ``tau``, in the order of its slots."""
        keys, counts = collect(self._entries[partition], min(tau, _MOST))
        return keys, counts

    def frequent(self, tau: int, threads: int = 1) -> tuple[Ints, Ints]:
        """Return all keys and counts that reach ``tau``, sorted by key."""
        with ThreadPoolExecutor(threads) as pool:
            parts = list(pool.map(self.items, range(PARTITIONS), repeat(tau)))
        return sort_pairs(*(np.concatenate([part[column] for part in parts]) for column in (0, 1)))


def sort_pairs(keys: Ints, counts: Ints) -> tuple[Ints, Ints]:
    order = np.argsort(keys)
    return keys[order], counts[order]


def table_bytes(distinct: float) -> float:
    """Return the size in bytes of :class:`PartitionedCounts` once it holds so many keys.

    The partitions fill evenly, so all of them have the smallest capacity of the growth sequence
    that holds their share.
    """
    share, capacity = distinct / PARTITIONS, _FIRST_CAPACITY
    while _limit(capacity) < share:
        capacity = _grown(capacity)
    return float(BYTES_PER_PAIR * capacity * PARTITIONS)


def index_bytes(keys: float) -> float:
    return BYTES_PER_PAIR * max(16.0, keys / _INDEX_LOAD)


def rank_index(keys: Ints) -> Ints:
    """Return a read-only index of different keys [R]: pairs of key and position [2 * capacity].

    They lie side by side, -1 where empty, so that a lookup touches one cache line.
    """
    index = _empty_pairs(max(16, int(len(keys) / _INDEX_LOAD)))
    insert(keys, np.arange(len(keys)), index, 0, index.size, 0)
    index.flags.writeable = False
    return index


def rank_indexes(keys: Mapping[int, Ints], order: int, lowest: int = 2) -> dict[int, Ints]:
    """Return the indexes that the keys of ``order`` are made with: those of the orders below.

    Orders under ``lowest`` are left out: places of a higher one are known.
    """
    return {n: rank_index(keys[n]) for n in keys if lowest <= n < order}


def _empty_pairs(capacity: int) -> Ints:
    return np.full(2 * capacity, EMPTY, dtype=np.int64)


def _limit(capacity: int) -> int:
    return int(capacity * _MAX_LOAD)


def _grown(capacity: int) -> int:
    return int(capacity * _GROWTH)
