"""Exact n-gram counting over token segments, one order at a time.

Both (n-1)-grams inside a frequent n-gram are frequent themselves (Apriori), so a position whose two
(n-1)-grams are not both frequent is dropped before it is counted. The frequent keys of an order
are the barrier before the next one. Beyond 3 tokens fewer positions are left: for rules of more
than 4 they are kept from order to order, 12 bytes each. A cluster runs the same loops
(``tasks.data.counting``).

The documents that the frequent n-grams occur in are counted in a second, read-only pass: its tables
never grow, and workers only add up vectors. An n-gram belongs to the document of its first token.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from itertools import islice, pairwise, repeat
from typing import Final

import numba
import numpy as np
from numpy.typing import NDArray

from umim_core.mining.hashing import PartitionedCounts, rank_index, rank_indexes
from umim_core.mining.kernel import (
    PARTITIONS,
    gram_ranks,
    next_places,
    next_ranks,
    scatter_keys,
    scatter_places,
)
from umim_core.rules.grams import LONGEST, NgramCounts, orders_to
from umim_core.text.token_ids import (
    MAX_TOKEN_ID,
    AnyInts,
    Ids,
    Ints,
    Offsets,
    check_flat,
    check_offsets,
    read_ids,
)

CHUNK_TOKENS: Final = 1 << 19
BYTES_PER_PLACE: Final = 12
CHUNKS_PER_THREAD: Final = 2  # so that a thread that is done early finds another one
_INSERT_TASKS: Final = 8
NO_KEYS: Final = np.zeros(0, dtype=np.int64)
_DOCUMENTS_TOKENS: Final = 1 << 20
_DENSE: Final = 3  # tokens of grams up to which most positions of a text are frequent
Places = dict[int, tuple[int, NDArray[np.int32], Ints]]
"""Frequent grams of chunks by their first token: the order, positions [P] and ranks [P]."""


def count_ngrams(
    ids: AnyInts,
    offsets: Offsets,
    tau: int,
    excluded: Iterable[int] = (),
    *,
    longest: int = LONGEST,
    threads: int | None = None,
) -> NgramCounts:
    """Count all grams of up to ``longest`` tokens that occur ``tau`` times, in one process.

    Args:
        ids: Token ids, flat [T], 0 .. 2^18 - 1: an array, memory-mapped or not, or token files.
        offsets: Segment borders [num_segments + 1] (int64), first 0, last T.
        tau: Least count; overlapping occurrences count.
        excluded: Ids that take part in no gram.
        longest: 2 to 16; the orders above it, up to 4, are there without a gram.
        threads: Threads; None takes one per core. The result does not depend on them.

    Source: paper, "N-gram Extraction and Frequency Counting".
    """
    check_flat(ids)
    check_offsets(offsets, len(ids))
    dropped = excluded_mask(excluded)
    orders = orders_to(longest)
    counts = NgramCounts(dict.fromkeys(orders, NO_KEYS), dict.fromkeys(orders, NO_KEYS), tau)
    places: Places | None = {} if longest > LONGEST else None
    for order in range(2, longest + 1):
        indexes = rank_indexes(counts.keys, order, order - 1 if places else 2)
        counter = OrderCounter(order, indexes, dropped, threads=threads, places=places)
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
    if threads is not None:
        return threads
    if sys.platform == "darwin":  # does not tell which cores a process may use
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(0))


class OrderCounter:
    """Count the n-grams of one order, chunk by chunk of about ``CHUNK_TOKENS`` a thread.

    Chunks of whole segments are turned into keys by position, each thread its own chunk, and then
    counted by partition, each thread its own partitions: nothing is locked and nothing merged.
    ``indexes`` are ``hashing.rank_indexes`` of the frequent keys of the whole corpus; ``excluded``
    says whether an id takes part in no gram [2^18]. None takes a thread per core. ``places``, where
    given, are those that the counter of the order below left: then its index is enough.
    """

    def __init__(
        self,
        order: int,
        indexes: Mapping[int, Ints],
        excluded: NDArray[np.bool_],
        *,
        threads: int | None = None,
        places: Places | None = None,
    ) -> None:
        self.table = PartitionedCounts()
        self._order = order
        self._excluded = excluded
        self._indexes = indexes
        self._places = places
        self._threads = thread_count(threads)

    def add(self, ids: AnyInts, offsets: Offsets, low: int = 0, high: int | None = None) -> None:
        """Count the segments ``low`` .. ``high - 1`` of ``ids``; may be called for further ones."""
        buffers = [_Buffers(CHUNK_TOKENS) for _ in range(CHUNKS_PER_THREAD * self._threads)]
        chunks = _chunks(ids, offsets, CHUNK_TOKENS, low, high)
        with ThreadPoolExecutor(self._threads) as pool:
            while group := list(islice(chunks, len(buffers))):
                used = buffers[: len(group)]
                list(pool.map(self._scatter, group, used))
                list(pool.map(self._insert, range(_INSERT_TASKS), repeat(used)))

    def frequent(self, tau: int) -> tuple[Ints, Ints]:
        """Return all keys and counts that reach ``tau``, sorted by key."""
        return self.table.frequent(tau, self._threads)

    def _scatter(self, chunk: tuple[int, Ids, Ints], buffers: _Buffers) -> None:
        first, ids, offsets = chunk
        buffers.fit(ids.size)
        ranks, known = buffers.ranks[: ids.size], self._order - 1
        if known < _DENSE or (known == _DENSE and self._places is None):
            gram_ranks(ids, offsets, known, self._excluded, self._indexes, ranks)
            scatter_keys(ids, offsets, self._order, ranks, buffers.keys, buffers.borders)
            return
        if self._places and first in self._places:
            order, places, at_places = self._places[first]
        else:
            gram_ranks(ids, offsets, _DENSE, self._excluded, self._indexes, ranks)
            order, places = _DENSE, np.flatnonzero(ranks >= 0).astype(np.int32)
            at_places = ranks[places]
        for n in range(order + 1, known + 1):
            count = next_places(ids, n, self._indexes[n], places, at_places)
            places, at_places = places[:count].copy(), at_places[:count].copy()
        if self._places is not None:
            self._places[first] = known, places, at_places
        scatter_places(ids, self._order, places, at_places, buffers.keys, buffers.borders)

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
    ids: AnyInts, offsets: Offsets, size: int, first: int = 0, last: int | None = None
) -> Iterator[tuple[int, Ids, Ints]]:
    """Yield the place, ids and borders of runs of whole segments, about ``size`` tokens each."""
    for low, high in segment_ranges(offsets, size, first, last):
        borders = np.asarray(offsets[low : high + 1])
        at = int(borders[0])
        yield at, read_ids(ids, at, int(borders[-1])), borders - at


def segment_ranges(
    offsets: Offsets, size: int, first: int = 0, last: int | None = None
) -> Iterator[tuple[int, int]]:
    """Yield ranges [low, high) of whole segments, at least one, of about ``size`` tokens each.

    They begin with the segment ``first`` and end before ``last``; None goes on to the end.
    """
    low, end = first, len(offsets) - 1 if last is None else last
    while low < end:
        target = int(offsets[low]) + size
        high = min(max(bisect_left(offsets, target), low + 1), end)
        yield low, high
        low = high


# Documents of given n-grams


@numba.njit(cache=True, nogil=True)
def _documents(
    ranks: Ints, stop: int, start: int, ends: Ints, first: int, last_seen: Ints, documents: Ints
) -> None:
    """Count each rank once per document; ``ends`` are global, ``start`` is that of the chunk."""
    document = first
    for position in range(stop):
        while start + position >= ends[document]:
            document += 1
        rank = ranks[position]
        if rank >= 0 and last_seen[rank] != document:
            last_seen[rank] = document
            documents[rank] += 1


def count_documents(
    ids: AnyInts, offsets: Offsets, keys: Mapping[int, Ints], ends: Ints, threads: int | None = None
) -> dict[int, Ints]:
    """Count the documents, which end at ``ends`` [D], of given n-grams of a corpus [T].

    They are sorted packed keys [R_n] per order, as ``NgramCounts`` has them, the prefix of each
    among those of order n - 1; so are the documents [R_n]. An n-gram takes 16 bytes a thread.
    """
    threads = thread_count(threads)
    total, tail, none = int(offsets[-1]), max(keys) - 1, excluded_mask(())
    # Each range of documents has its own counts; the indexes, larger than those, are only read.
    indexes = {n: rank_index(keys[n]) for n in keys}

    def counted(bounds: tuple[int, int]) -> dict[int, Ints]:
        low, high = bounds
        found = {n: np.zeros(len(keys[n]), dtype=np.int64) for n in keys}
        seen = {n: np.full(len(keys[n]), -1, dtype=np.int64) for n in keys}
        ranks = np.empty(_DOCUMENTS_TOKENS + tail, dtype=np.int64)
        for start in range(low, high, _DOCUMENTS_TOKENS):
            stop = min(start + _DOCUMENTS_TOKENS, high)
            chunk = read_ids(ids, start, min(stop + tail, total))
            borders = _borders(offsets, start, start + chunk.size)
            part = ranks[: chunk.size]
            gram_ranks(chunk, borders, 1, none, indexes, part)
            document = int(np.searchsorted(ends, start, side="right"))
            for n in keys:
                next_ranks(chunk, borders, n, indexes[n], part)
                _documents(part, stop - start, start, ends, document, seen[n], found[n])
        return found

    with ThreadPoolExecutor(threads) as pool:
        parts = list(pool.map(counted, document_ranges(total, ends, threads) or [(0, 0)]))
    return {n: reduce(np.add, (part[n] for part in parts)) for n in keys}


def _borders(offsets: Offsets, low: int, high: int) -> Ints:
    """Return the segment borders in ``[low, high]`` with both ends, counted from ``low``."""
    inner = offsets[bisect_left(offsets, low + 1) : bisect_left(offsets, high)]
    return np.concatenate([[low], np.asarray(inner, np.int64), [high]]) - low


def document_ranges(total: int, ends: Ints, parts: int) -> list[tuple[int, int]]:
    """Cut tokens into at most so many ranges of about equal size, at ends of documents."""
    cuts = np.arange(parts + 1, dtype=np.int64) * total // parts
    at = np.searchsorted(ends, cuts[1:-1])
    inner = ends[np.minimum(at, len(ends) - 1)]
    cuts = np.unique(np.concatenate([cuts[:1], np.minimum(inner, total), cuts[-1:]]))
    return [(int(low), int(high)) for low, high in pairwise(cuts) if low < high]
