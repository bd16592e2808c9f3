"""Find the frequent n-grams of a corpus: exactly, or exactly among candidates from a sample.

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
from umim_core.mining.candidates import (
    SAMPLE_TAU,
    CandidateReport,
    choose_candidates,
    miss_probability,
    sample_segments,
)
from umim_core.mining.counting import count_ngrams, thread_count
from umim_core.mining.hashing import rank_index
from umim_core.mining.mining_options import SearchOptions
from umim_core.mining.recount import NO_DOCUMENTS, Recount, document_ranges
from umim_core.rules.grams import ORDERS, NgramCounts, check_tau, select
from umim_core.text.token_ids import Ints, Offsets, Tokens


class Counter(Protocol):
    """Interface of what counts a corpus: this process or a cluster."""

    def count(self, tau: int) -> NgramCounts:
        """Count everything that occurs at least ``tau`` times."""

    def count_sample(self, ids: Tokens, offsets: Offsets, tau: int) -> NgramCounts:
        """Count everything that occurs at least ``tau`` times in a sample held in memory."""

    def recount(
        self, keys: dict[int, Ints], document_ends: Ints | None
    ) -> tuple[dict[int, Ints], dict[int, Ints]]:
        """Count given n-grams, and their documents where ends are given."""


@dataclass(frozen=True)
class LocalCounter:
    """Count in this process.

    Attributes:
        ids: Token ids [T].
        offsets: Segment borders [num_segments + 1].
        excluded: Ids that take part in no n-gram.
        threads: Threads; None takes one per core.
    """

    ids: Tokens
    offsets: Offsets
    excluded: tuple[int, ...] = ()
    threads: int | None = None

    def count(self, tau: int) -> NgramCounts:
        """Count everything that occurs at least ``tau`` times."""
        return self.count_sample(self.ids, self.offsets, tau)

    def count_sample(self, ids: Tokens, offsets: Offsets, tau: int) -> NgramCounts:
        """Count everything that occurs at least ``tau`` times in a sample held in memory."""
        return count_ngrams(ids, offsets, tau, self.excluded, threads=self.threads)

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
    ids: Tokens,
    offsets: Offsets,
    options: SearchOptions,
    counter: Counter,
    document_ends: Ints | None = None,
) -> tuple[NgramCounts, CandidateReport | None]:
    """Find the n-grams that occur at least ``tau`` times.

    Args:
        ids: Token ids [T].
        offsets: Segment borders [num_segments + 1].
        options: What is looked for.
        counter: Counts the corpus, without the ids that take part in no n-gram.
        document_ends: End positions of the documents [D], where they are counted.

    Returns:
        The counts, all of them exact; and in candidate mode how the candidates were chosen.

    Raises:
        CorpusError: If ids are out of range.
        RuleSetError: If an option is out of its bounds.
    """
    check_tau(options.tau)
    ends = None
    if options.count_documents:
        if document_ends is None or not len(document_ends):
            raise RuleSetError("counting documents needs their borders", "none", "Mine text.")
        ends = document_ends
    total = int(offsets[-1])
    if (sampled := options.counted_tokens(total)) == total:
        counts = counter.count(options.tau)
        if ends is None:
            return counts, None
        _, documents = counter.recount(counts.keys, ends)
        return NgramCounts(counts.keys, counts.support, counts.tau, documents), None
    sample, borders = sample_segments(ids, offsets, sampled, options.seed)
    sampled_counts = counter.count_sample(sample, borders, SAMPLE_TAU)
    chosen = choose_candidates(sampled_counts, options.max_candidates)
    support, documents = counter.recount(chosen.keys, ends)
    recounted = NgramCounts(chosen.keys, support, 0, documents if ends is not None else None)
    fraction = len(sample) / total
    report = CandidateReport(
        fraction, len(chosen), chosen.tau, miss_probability(options.tau, fraction, chosen.tau)
    )
    return select(recounted, options.tau), report
