"""Exact n-gram counting over token segments, one order at a time, in one process.

Both (n-1)-grams inside a frequent n-gram are frequent themselves (Apriori), so a position whose two
(n-1)-grams are not both frequent is dropped before it is counted. The frequent keys of an order
are the barrier before the next one. A cluster runs the same loops (``tasks.data.counting``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, repeat
from typing import Final

import numpy as np
from numpy.typing import NDArray

from umim_core.errors import RuleSetError
from umim_core.mining.hashing import NO_INDEX, PartitionedCounts, rank_indexes
from umim_core.mining.kernel import PARTITIONS, gram_ranks, scatter_keys
from umim_core.rules.grams import ORDERS, NgramCounts, check_tau
from umim_core.text.token_ids import (
    MAX_TOKEN_ID,
    Ids,
    Ints,
    Offsets,
    Tokens,
    UniformOffsets,
    check_flat,
    check_offsets,
    read_ids,
)

CHUNK_TOKENS: Final = 1 << 19
CHUNKS_PER_THREAD: Final = 2  # so that a thread that is done early finds another one
_INSERT_TASKS: Final = 8
NO_KEYS: Final = np.zeros(0, dtype=np.int64)


def count_ngrams(
    ids: Tokens,
    offsets: Offsets,
    tau: int,
    excluded: Iterable[int] = (),
    max_order: int = ORDERS[-1],
    *,
    threads: int | None = None,
) -> NgramCounts:
    """Count all 2-, 3- and 4-grams that occur at least ``tau`` times, in one process.

    Args:
        ids: Token ids, flat [T], 0 .. 2^18 - 1: an array, memory-mapped or not, or token files.
        offsets: Segment borders [num_segments + 1] (int64), first 0, last T.
        tau: Least count, at least 1; overlapping occurrences count.
        excluded: Ids that take part in no gram.
        max_order: Longest order to count; longer ones are empty in the result.
        threads: Threads; None takes one per core. The result does not depend on them.

    Source: paper, "N-gram Extraction and Frequency Counting".
    """
    check_tau(tau)
    thread_count(threads)
    check_flat(ids)
    check_offsets(offsets, len(ids))
    dropped = excluded_mask(excluded)
    counts = NgramCounts(dict.fromkeys(ORDERS, NO_KEYS), dict.fromkeys(ORDERS, NO_KEYS), tau)
    for order in range(ORDERS[0], max_order + 1):
        indexes = rank_indexes(counts.keys, order)
        counter = OrderCounter(order, indexes, dropped, threads=threads)
        counter.add(ids, offsets)
        counts.keys[order], counts.support[order] = counter.frequent(tau)
    return counts


def excluded_mask(excluded: Iterable[int]) -> NDArray[np.bool_]:
    """Return whether each possible id is excluded [2^18]."""
    mask = np.zeros(MAX_TOKEN_ID + 1, dtype=np.bool_)
    ids = np.array(sorted(excluded), dtype=np.int64)
    mask[ids[ids <= MAX_TOKEN_ID]] = True  # a vocabulary may be larger, no corpus holds the rest
    return mask


def thread_count(threads: int | None) -> int:
    """Return a number of threads; None stands for one per core."""
    if threads is not None and threads < 1:
        raise RuleSetError("threads must be at least 1", threads, "Leave it out for all cores.")
    if threads is not None:
        return threads
    if sys.platform == "darwin":  # does not tell which cores a process may use
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(0))


class OrderCounter:
    """Count the n-grams of one order, 2 to 4, chunk by chunk of about ``chunk_tokens`` a thread.

    Chunks of whole segments are turned into keys by position, each thread its own chunk, and then
    counted by partition, each thread its own partitions: nothing is locked and nothing merged.
    ``indexes`` are ``hashing.rank_indexes`` of the frequent keys of the whole corpus; ``excluded``
    says whether an id takes part in no gram [2^18]. None takes a thread per core.
    """

    def __init__(
        self,
        order: int,
        indexes: Mapping[int, Ints],
        excluded: NDArray[np.bool_],
        *,
        threads: int | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        if order not in ORDERS:
            raise RuleSetError("an n-gram's order must be 2, 3 or 4", order, "Choose one of them.")
        self.table = PartitionedCounts()
        self._order = order
        self._excluded = excluded
        self._pairs, self._triples = (indexes.get(n, NO_INDEX) for n in (2, 3))
        self._threads = thread_count(threads)
        self._chunk_tokens = chunk_tokens

    def add(self, ids: Tokens, offsets: Offsets, low: int = 0, high: int | None = None) -> None:
        """Count the segments ``low`` .. ``high - 1`` of ``ids``; may be called for further ones."""
        buffers = [_Buffers(self._chunk_tokens) for _ in range(CHUNKS_PER_THREAD * self._threads)]
        chunks = _chunks(ids, offsets, self._chunk_tokens, low, high)
        with ThreadPoolExecutor(self._threads) as pool:
            while group := list(islice(chunks, len(buffers))):
                used = buffers[: len(group)]
                list(pool.map(self._scatter, group, used))
                list(pool.map(self._insert, range(_INSERT_TASKS), repeat(used)))

    def frequent(self, tau: int) -> tuple[Ints, Ints]:
        """Return all keys and counts that reach ``tau``, sorted by key."""
        with ThreadPoolExecutor(self._threads) as pool:
            return self.table.frequent(tau, pool)

    def _scatter(self, chunk: tuple[Ids, Ints], buffers: _Buffers) -> None:
        ids, offsets = chunk
        buffers.fit(ids.size)
        ranks = buffers.ranks[: ids.size]
        gram_ranks(ids, offsets, self._order - 1, self._excluded, self._pairs, self._triples, ranks)
        scatter_keys(ids, offsets, self._order, ranks, buffers.keys, buffers.borders)

    def _insert(self, first: int, buffers: list[_Buffers]) -> None:
        for partition in range(first, PARTITIONS, _INSERT_TASKS):
            for buffer in buffers:
                low, high = buffer.borders[partition], buffer.borders[partition + 1]
                self.table.add(partition, buffer.keys[low:high])


class _Buffers:
    """Working memory of one thread: 16 bytes per token of a chunk."""

    def __init__(self, size: int) -> None:
        self.borders = np.zeros(PARTITIONS + 1, dtype=np.int64)
        self.ranks = self.keys = NO_KEYS
        self.fit(size)

    def fit(self, size: int) -> None:
        """Make room for a chunk of ``size`` tokens."""
        if self.ranks.size < size:
            self.ranks, self.keys = np.empty(size, np.int64), np.empty(size, np.int64)


def _chunks(
    ids: Tokens, offsets: Offsets, size: int, first: int = 0, last: int | None = None
) -> Iterator[tuple[Ids, Ints]]:
    """Yield the ids and borders of runs of whole segments, about ``size`` tokens each."""
    for low, high in segment_ranges(offsets, size, first, last):
        borders = np.asarray(offsets[low : high + 1])
        yield read_ids(ids, int(borders[0]), int(borders[-1])), borders - borders[0]


def segment_ranges(
    offsets: Offsets, size: int, first: int = 0, last: int | None = None
) -> Iterator[tuple[int, int]]:
    """Yield ranges [low, high) of whole segments, at least one, of about ``size`` tokens each.

    They begin with the segment ``first`` and end before ``last``; None goes on to the end.
    """
    low, end = first, len(offsets) - 1 if last is None else last
    while low < end:
        target = int(offsets[low]) + size
        if isinstance(offsets, UniformOffsets):
            high = offsets.find(target)
        else:
            high = int(np.searchsorted(offsets, target))
        high = min(max(high, low + 1), end)
        yield low, high
        low = high
