"""Find the frequent n-grams of a corpus, with the documents that they occur in.

Who counts is handed in (:class:`Counter`): one process (:class:`LocalCounter`), or a cluster in
``tasks.data.counting``.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from umim_core.errors import RuleSetError
from umim_core.mining.counting import count_ngrams, thread_count
from umim_core.mining.hashing import rank_index
from umim_core.mining.mining_options import MiningOptions
from umim_core.mining.recount import NO_DOCUMENTS, Recount, document_ranges
from umim_core.rules.grams import ORDERS, NgramCounts, check_tau
from umim_core.text.token_ids import Ints, Offsets, Tokens


class Counter(Protocol):
    """Interface of what counts a corpus: this process or a cluster."""

    def count(self, tau: int) -> NgramCounts:
        """Count everything that occurs at least ``tau`` times."""

    def recount(
        self, keys: dict[int, Ints], document_ends: Ints | None
    ) -> tuple[dict[int, Ints], dict[int, Ints]]:
        """Count given n-grams, and their documents where ends are given."""


@dataclass(frozen=True)
class LocalCounter:
    """Count in this process: ids [T] in segments with borders [num_segments + 1].

    ``excluded`` ids take part in no n-gram; None takes a thread per core.
    """

    ids: Tokens
    offsets: Offsets
    excluded: tuple[int, ...] = ()
    threads: int | None = None

    def count(self, tau: int) -> NgramCounts:
        """Count everything that occurs at least ``tau`` times."""
        return count_ngrams(self.ids, self.offsets, tau, self.excluded, threads=self.threads)

    def recount(
        self, keys: dict[int, Ints], document_ends: Ints | None
    ) -> tuple[dict[int, Ints], dict[int, Ints]]:
        """Count given n-grams, and their documents where ends are given."""
        threads = thread_count(self.threads)
        total = int(self.offsets[-1])
        ranges = recount_ranges(total, document_ends, threads) or [(0, 0)]
        # Each range has its own counts; the indexes, larger than those, are only read.
        indexes = {n: rank_index(keys[n]) for n in ORDERS}
        recounts = [
            Recount(keys, count_documents=document_ends is not None, indexes=indexes)
            for _ in ranges
        ]
        ends = NO_DOCUMENTS if document_ends is None else document_ends
        with ThreadPoolExecutor(threads) as pool:
            jobs = [
                pool.submit(recount.add, self.ids, self.offsets, low, high, ends)
                for recount, (low, high) in zip(recounts, ranges, strict=True)
            ]
            for job in jobs:
                job.result()
        whole = recounts[0]
        for part in recounts[1:]:
            for n in ORDERS:
                np.add(whole.support[n], part.support[n], out=whole.support[n])
                np.add(whole.documents[n], part.documents[n], out=whole.documents[n])
        return whole.support, whole.documents


def recount_ranges(total: int, document_ends: Ints | None, parts: int) -> list[tuple[int, int]]:
    """Cut ``total`` tokens into ranges to recount, at document borders where they matter."""
    if document_ends is not None:
        return document_ranges(document_ends, total, parts)
    cuts = [total * part // parts for part in range(parts + 1)]
    return [(low, high) for low, high in pairwise(cuts) if low < high]


def find_ngrams(
    options: MiningOptions, counter: Counter, document_ends: Ints | None = None
) -> NgramCounts:
    """Find the n-grams that occur at least ``tau`` times.

    Documents end at ``document_ends`` [D], which is needed where the options count them.
    """
    check_tau(options.tau)
    if not options.count_documents:
        return counter.count(options.tau)
    if document_ends is None or not len(document_ends):
        raise RuleSetError("counting documents needs their borders", "none", "Mine text.")
    counts = counter.count(options.tau)
    _, documents = counter.recount(counts.keys, document_ends)
    return NgramCounts(counts.keys, counts.support, counts.tau, documents)
