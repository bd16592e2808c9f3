"""Exact counts of given n-grams on Ray Data, and the cluster's counter for the stage ``count``.

A map task counts its own range of tokens into vectors; they are added up on the driver. Nothing is
shuffled. There is one task per core, so the vectors that move do not grow with the corpus.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import ray

from tasks.data.counting import Finished, Known, count_distributed, ignore, nothing_known
from tasks.data.counting_tables import (
    TASK_RESTARTS,
    TOKEN_BYTES,
    Corpus,
    cluster_cpus,
    packed_row,
    prepare_ray_data,
    result_tables,
    unpacked,
)
from tasks.data.meter import Progress, metered
from umim_core.errors import ClusterError
from umim_core.mining.finding import recount_ranges
from umim_core.mining.recount import NO_DOCUMENTS, Recount
from umim_core.rules.grams import ORDERS, NgramCounts


def recount_distributed(
    corpus: Corpus,
    keys: dict[int, np.ndarray],
    document_ends: np.ndarray | None = None,
    progress: Progress | None = None,
) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
    """Count given n-grams exactly, and the documents they occur in, in one pass without a shuffle.

    Args:
        corpus: What is counted.
        keys: Sorted packed keys [R_n] per order.
        document_ends: End positions of all documents [D] to count documents; else None.
        progress: As for :func:`count_distributed`.

    Returns:
        Support and documents [R_n] per order; documents are empty where they are not counted.

    Raises:
        ClusterError: If workers were lost more often than Ray restarts them.
    """
    prepare_ray_data()
    total = int(corpus.offsets[-1])
    ranges = recount_ranges(total, document_ends, cluster_cpus())
    reference, tables = ray.put(corpus), ray.put((keys, document_ends))
    with metered(total * TOKEN_BYTES, "documents", progress) as meter:

        def local(batch: dict[str, np.ndarray]) -> Iterable[pa.Table]:
            opened = ray.get(reference)
            wanted, ends = ray.get(tables)
            for number, low, high in zip(batch["range"], batch["low"], batch["high"], strict=True):
                recount = Recount(wanted, count_documents=ends is not None)
                ends_or_none = NO_DOCUMENTS if ends is None else ends
                recount.add(opened.open(), opened.offsets, int(low), int(high), ends_or_none)
                meter.add(int(high - low) * TOKEN_BYTES)
                for order in ORDERS:
                    yield packed_row(
                        {"order": order},
                        ranges=np.array([number], np.int64),
                        support=recount.support[order],
                        documents=recount.documents[order],
                    )

        dataset = ray.data.from_items(
            [{"range": number, "low": a, "high": b} for number, (a, b) in enumerate(ranges)],
            override_num_blocks=max(1, len(ranges)),
        ).map_batches(local, batch_size=None, max_retries=TASK_RESTARTS)
        sizes = {n: len(keys[n]) for n in ORDERS}
        return _added(
            result_tables(dataset), sizes, sizes if document_ends is not None else {}, len(ranges)
        )


def _added(
    tables: Iterable[pa.Table], sizes: dict[int, int], spread: dict[int, int], ranges: int
) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
    """Add up the counts of all ranges, once each is accounted for."""
    support = {n: np.zeros(sizes[n], np.int64) for n in ORDERS}
    documents = {n: np.zeros(spread.get(n, 0), np.int64) for n in ORDERS}
    left = {(n, number) for n in ORDERS for number in range(ranges)}
    for rows in tables:
        for row in range(rows.num_rows):
            order = rows["order"][row].as_py()
            for number in unpacked(rows, "ranges", row).tolist():
                if (order, number) not in left:
                    raise ClusterError(
                        f"each of {ranges} ranges must be counted once",
                        f"range {number} of {order}-grams, not awaited",
                        "Run the same command again.",
                    )
                left.remove((order, number))
            support[order] += unpacked(rows, "support", row)
            documents[order] += unpacked(rows, "documents", row)
    if left:
        raise ClusterError(
            f"{ranges * len(ORDERS)} partial counts must come back",
            ranges * len(ORDERS) - len(left),
            "Run the same command again.",
        )
    return support, documents


@dataclass(frozen=True)
class ClusterCounter:
    """Count on the running cluster; see :func:`count_distributed` for the fields.

    Attributes:
        corpus: What is counted.
        block_tokens: Tokens that one task counts.
        known: Gives the orders that an earlier run has finished.
        finished: Receives those that this run finishes.
        progress: Receives the bytes read.
    """

    corpus: Corpus
    block_tokens: int | None = None
    known: Known = nothing_known
    finished: Finished = ignore
    progress: Progress | None = None

    def count(self, tau: int) -> NgramCounts:
        """Count everything that occurs at least ``tau`` times."""
        return count_distributed(
            self.corpus,
            tau,
            block_tokens=self.block_tokens,
            known=self.known,
            finished=self.finished,
            progress=self.progress,
        )

    def recount(
        self, keys: dict[int, np.ndarray], document_ends: np.ndarray | None
    ) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
        """Count given n-grams, and their documents where ends are given."""
        return recount_distributed(self.corpus, keys, document_ends, self.progress)
