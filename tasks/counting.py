"""Exact n-gram counts on Ray Data.

Each order is one pass: blocks of whole segments are counted locally, (key, count) pairs are
shuffled by key, added up and cut at tau. The frequent keys of an order are the barrier before the
next one. Only packed int64 columns move. Workers import this module, so it stays free of torch.
"""

from __future__ import annotations

import logging
from itertools import pairwise

import numpy as np
import pyarrow as pa
import ray
from ray.data import DataContext

from umim_core.rules.counting import ORDERS, NgramCounts, add_counts, local_counts

BLOCK_TOKENS = 1 << 21
_PARTITIONS_PER_CPU = 2


def count_distributed(
    ids: np.ndarray,
    offsets: np.ndarray,
    tau: int,
    excluded: np.ndarray,
    block_tokens: int = BLOCK_TOKENS,
) -> NgramCounts:
    """Count all 2-, 3- and 4-grams on the running Ray cluster.

    Args:
        ids: Token ids, flat [T].
        offsets: Segment borders [num_segments + 1] (int64).
        tau: Least count.
        excluded: Ids that take part in no gram, sorted.
        block_tokens: Tokens of a block, about; a block holds whole segments.

    Returns:
        The same as :func:`umim_core.rules.counting.count_ngrams`, whatever the block sizes.
    """
    DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    blocks = _blocks(ids, offsets, block_tokens)
    partitions = max(1, int(ray.cluster_resources().get("CPU", 1))) * _PARTITIONS_PER_CPU
    counts = NgramCounts({}, {}, tau)
    for order in ORDERS:
        lower = ray.put(dict(counts.keys))

        def local(batch: dict[str, np.ndarray], order: int = order, lower=lower) -> pa.Table:
            pairs = [
                local_counts(ids, offsets, order, ray.get(lower), excluded)
                for ids, offsets in zip(batch["ids"], batch["offsets"], strict=True)
            ]
            return _table(*add_counts(pairs))

        def total(batch: pa.Table) -> pa.Table:
            keys, support = add_counts([(batch["key"].to_numpy(), batch["count"].to_numpy())])
            return _table(keys[support >= tau], support[support >= tau])

        dataset = (
            ray.data.from_blocks(blocks)
            .map_batches(local, batch_size=None)
            .repartition(partitions, keys=["key"])
            .map_batches(total, batch_size=None, batch_format="pyarrow")
        )
        parts = [
            (table["key"].to_numpy(), table["count"].to_numpy())
            for table in (ray.get(ref) for ref in dataset.to_arrow_refs())
            if table.num_rows
        ]
        counts.keys[order], counts.support[order] = add_counts(parts)
    return counts


def _blocks(ids: np.ndarray, offsets: np.ndarray, size: int) -> list[pa.Table]:
    """Cut the corpus into one-row tables of whole segments, about ``size`` tokens each."""
    cuts = [0]
    for border in range(1, len(offsets)):
        if offsets[border] - offsets[cuts[-1]] >= size:
            cuts.append(border)
    if cuts[-1] != len(offsets) - 1:
        cuts.append(len(offsets) - 1)
    return [
        pa.table(
            {
                "ids": pa.array([ids[offsets[low] : offsets[high]]], pa.large_list(pa.int32())),
                "offsets": pa.array(
                    [offsets[low : high + 1] - offsets[low]], pa.large_list(pa.int64())
                ),
            }
        )
        for low, high in pairwise(cuts)
    ]


def _table(keys: np.ndarray, counts: np.ndarray) -> pa.Table:
    return pa.table({"key": pa.array(keys, pa.int64()), "count": pa.array(counts, pa.int64())})
