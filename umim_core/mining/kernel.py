"""Compiled loops of n-gram counting: candidate keys, partitioned hash tables, lookups.

A key (int64, ``rules.grams``) is spread by one multiplication; the top bits of the product choose
its partition, the bits below its slot. Partitions are counted one after the other, so the part of
the table that is written fits into the cache. Where a lookup cannot be kept in the cache, its slot
is fetched ahead.

key * odd constant = | partition | slot ......................... |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numba
import numpy as np
from numpy.typing import NDArray

from umim_core.rules.trie import prefetch
from umim_core.text.token_ids import TOKEN_BITS, Ids, Ints

EMPTY: Final = np.int64(-1)
PARTITION_BITS: Final = 6
PARTITIONS: Final = 1 << PARTITION_BITS
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio (Fibonacci hashing)
_HALF: Final = np.uint64(32)
_PARTITION_SHIFT: Final = np.uint64(64 - PARTITION_BITS)
_PARTITION_BITS: Final = np.uint64(PARTITION_BITS)
_AHEAD: Final = 16  # 16 and 32 are equally fast, without it a lookup takes 2.5 times as long
_njit = numba.njit(cache=True, nogil=True)


@_njit
def _partition(key: int) -> int:
    return int(np.int64((np.uint64(key) * _MIX) >> _PARTITION_SHIFT))


@_njit
def _slot(key: int, capacity: int) -> int:
    """Return the home slot of a key: the 32 bits below the partition, scaled to the capacity."""
    below = ((np.uint64(key) * _MIX) << _PARTITION_BITS) >> _HALF
    return int(np.int64((below * np.uint64(capacity)) >> _HALF))


@_njit
def insert(
    keys: Ints, weights: Ints, entries: Ints, used: int, limit: int, begin: int
) -> tuple[int, int]:
    """Add keys [K] from ``begin`` on to a table until all are in or ``limit`` pairs are in use.

    Each adds its weight [K], or 1 where there are none. ``entries`` are the table's (key, count)
    pairs [2 * capacity], -1 where empty; they are changed.

    Returns:
        Index of the first key that was not added, pairs in use.
    """
    end = entries.size
    capacity = end // 2
    weighted = weights.size > 0
    for index in range(begin, keys.size):
        if index + _AHEAD < keys.size:
            prefetch(entries, 2 * _slot(keys[index + _AHEAD], capacity))
        key = keys[index]
        at = 2 * _slot(key, capacity)
        while entries[at] != key and entries[at] != EMPTY:
            at += 2
            if at == end:
                at = 0
        if entries[at] == EMPTY:
            if used == limit:
                return index, used
            entries[at] = key
            entries[at + 1] = 0
            used += 1
        entries[at + 1] += weights[index] if weighted else 1
    return keys.size, used


@_njit
def collect(entries: Ints, tau: int) -> tuple[Ints, Ints]:
    """Return keys and counts of a table's entries that reach ``tau``, in no order."""
    entry_count = 0
    for at in range(0, entries.size, 2):
        if entries[at] != EMPTY and entries[at + 1] >= tau:
            entry_count += 1
    keys, counts = np.empty(entry_count, dtype=np.int64), np.empty(entry_count, dtype=np.int64)
    entry_count = 0
    for at in range(0, entries.size, 2):
        if entries[at] != EMPTY and entries[at + 1] >= tau:
            keys[entry_count] = entries[at]
            counts[entry_count] = entries[at + 1]
            entry_count += 1
    return keys, counts


@_njit
def _find(index: Ints, key: int) -> int:
    """Return the rank of a key, or -1."""
    end = index.size
    at = 2 * _slot(key, end // 2)
    while index[at] != EMPTY:
        if index[at] == key:
            return int(index[at + 1])
        at += 2
        if at == end:
            at = 0
    return -1


@_njit
def _first_ranks(ids: Ids, excluded: NDArray[np.bool_], ranks: Ints) -> None:
    for position in range(ids.size):
        token = ids[position]
        ranks[position] = -1 if excluded[token] else token


@_njit
def next_ranks(ids: Ids, offsets: Ints, order: int, index: Ints, ranks: Ints) -> None:
    """Turn ranks of (order - 1)-grams into ranks of ``order``-grams, in place.

    ``ranks[i]`` is the rank of the gram that starts at position i, or -1.
    """
    capacity = index.size // 2
    for row in range(offsets.size - 1):
        begin, end = offsets[row], offsets[row + 1]
        stop = max(begin, end - order + 1)
        for position in range(begin, stop):
            ahead = position + _AHEAD
            if ahead < stop and ranks[ahead] >= 0 and ranks[ahead + 1] >= 0:
                coming = (ranks[ahead] << TOKEN_BITS) | np.int64(ids[ahead + order - 1])
                prefetch(index, 2 * _slot(coming, capacity))
            if ranks[position] >= 0 and ranks[position + 1] >= 0:
                key = (ranks[position] << TOKEN_BITS) | np.int64(ids[position + order - 1])
                ranks[position] = _find(index, key)
            else:
                ranks[position] = -1
        for position in range(stop, end):
            ranks[position] = -1


def gram_ranks(
    ids: Ids,
    offsets: Ints,
    order: int,
    excluded: NDArray[np.bool_],
    indexes: Mapping[int, Ints],
    ranks: Ints,
) -> None:
    """Write the rank of the ``order``-gram that starts at each position to ``ranks`` [T].

    It is -1 for no frequent gram, or one with an excluded id [2^18]; the rank of a 1-gram is its
    id. ``indexes`` per order are ``hashing.rank_index`` of the frequent grams.
    """
    _first_ranks(ids, excluded, ranks)
    for n in range(2, order + 1):
        next_ranks(ids, offsets, n, indexes[n], ranks)


@_njit
def next_places(ids: Ids, order: int, index: Ints, places: NDArray[np.int32], ranks: Ints) -> int:
    """Turn places and ranks of frequent (order - 1)-grams into those of ``order``-grams.

    They are changed in place. Neighbours lie in one segment, as both grams do and overlap.

    Returns:
        How many are left.
    """
    capacity, count = index.size // 2, 0
    for k in range(places.size - 1):
        ahead = k + _AHEAD
        if ahead < places.size - 1 and places[ahead + 1] == places[ahead] + 1:
            coming = (ranks[ahead] << TOKEN_BITS) | np.int64(ids[places[ahead] + order - 1])
            prefetch(index, 2 * _slot(coming, capacity))
        if places[k + 1] == places[k] + 1:
            key = (ranks[k] << TOKEN_BITS) | np.int64(ids[places[k] + order - 1])
            rank = _find(index, key)
            if rank >= 0:
                places[count], ranks[count] = places[k], rank
                count += 1
    return count


@_njit
def scatter_places(
    ids: Ids,
    order: int,
    places: NDArray[np.int32],
    ranks: Ints,
    keys: Ints,
    borders: Ints,
) -> None:
    """Write the candidate keys of ``order`` as :func:`scatter_keys` does, of frequent places."""
    sizes = np.zeros(PARTITIONS, dtype=np.int64)
    for k in range(places.size - 1):
        if places[k + 1] == places[k] + 1:
            key = (ranks[k] << TOKEN_BITS) | np.int64(ids[places[k] + order - 1])
            sizes[_partition(key)] += 1
    _begin(sizes, borders)
    for k in range(places.size - 1):
        if places[k + 1] == places[k] + 1:
            key = (ranks[k] << TOKEN_BITS) | np.int64(ids[places[k] + order - 1])
            part = _partition(key)
            keys[sizes[part]] = key
            sizes[part] += 1


@_njit
def _begin(sizes: Ints, borders: Ints) -> None:
    """Write the borders of partitions of some sizes, and turn the sizes into their begins."""
    borders[0] = 0
    for part in range(PARTITIONS):
        borders[part + 1] = borders[part] + sizes[part]
        sizes[part] = borders[part]


@_njit
def scatter_keys(
    ids: Ids, offsets: Ints, order: int, ranks: Ints, keys: Ints, borders: Ints
) -> None:
    """Write the candidate keys of ``order`` grouped by partition.

    ``ranks`` [T] are those of the (n-1)-grams. Results are ``keys``, with room for [T], and
    ``borders`` [PARTITIONS + 1]: partition p is ``keys[borders[p]:borders[p + 1]]``.
    """
    sizes = np.zeros(PARTITIONS, dtype=np.int64)
    for row in range(offsets.size - 1):
        for position in range(offsets[row], offsets[row + 1] - order + 1):
            if ranks[position] >= 0 and ranks[position + 1] >= 0:
                key = (ranks[position] << TOKEN_BITS) | np.int64(ids[position + order - 1])
                sizes[_partition(key)] += 1
    _begin(sizes, borders)
    for row in range(offsets.size - 1):
        for position in range(offsets[row], offsets[row + 1] - order + 1):
            if ranks[position] >= 0 and ranks[position + 1] >= 0:
                key = (ranks[position] << TOKEN_BITS) | np.int64(ids[position + order - 1])
                part = _partition(key)
                keys[sizes[part]] = key
                sizes[part] += 1
