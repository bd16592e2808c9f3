r"""Exact n-gram counts on Ray Data.

Each order is one pass. A map task reads its own range of segments, counts it in a hash table (the
map-side combine) and hands on one row per hash partition; the rows are sorted by partition into
a few pieces, added up and cut at tau. The frequent keys of an order are the barrier before the
next one. A row is a packed list of keys and one of counts, so few rows move, whatever the number
of n-grams::

    segments 0..k   -> task 0 -> rows (0, keys, counts) .. (63, keys, counts) \
    segments k..2k  -> task 1 -> rows (0, keys, counts) .. (63, keys, counts)  > sort by partition
    ...                                                                       /

Workers import this module, so it stays free of torch.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import ray
from ray.data import DataContext
from ray.data.context import ShuffleStrategy
from ray.exceptions import RayError

from tasks.cluster.worker_errors import cluster_error
from umim_core.errors import ClusterError
from umim_core.mining.counting import (
    NO_KEYS,
    OrderCounter,
    excluded_mask,
    segment_ranges,
)
from umim_core.mining.hashing import PartitionedCounts, rank_indexes, sort_pairs
from umim_core.mining.kernel import PARTITIONS
from umim_core.rules.grams import LONGEST, NgramCounts, orders_to
from umim_core.text.token_ids import AnyInts, Offsets
from umim_core.text.tokens import TokenFiles

AGAIN = "Run the same command again; finished orders are kept."
TASK_RESTARTS = 10  # Ray Data's default is no limit: a task that kills its worker would never end
# What these log is raised as well, as a typed error.
_ERRORS_TOLD_TWICE = (
    "ray.data.exceptions",
    "ray.data._internal.execution.streaming_executor_state",
)
_PIECES_PER_CPU = 2
_MIN_BLOCK_TOKENS = 1 << 21
_MAX_BLOCK_TOKENS = 1 << 27  # about 1 GB of tables for prose
Progress = Callable[[int, int, str], None]
Counted = tuple[np.ndarray, np.ndarray]  # keys and counts of an order
Kept = Callable[[int, Callable[[], Counted]], Counted]


@dataclass(frozen=True)
class Corpus:
    """Tokens that every worker can read.

    Attributes:
        tokens: Folder of token files, which all nodes see.
        offsets: Segment borders [num_segments + 1].
        excluded: Ids that take part in no gram.
    """

    tokens: Path
    offsets: Offsets
    excluded: tuple[int, ...] = ()

    def open(self) -> AnyInts:
        """Return the tokens, memory-mapped."""
        return TokenFiles.open(self.tokens).ids


def cluster_cpus() -> int:
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def prepare_ray_data() -> None:
    """Keep Ray Data's notes off the terminal, and let it shuffle by tasks.

    The default, hash shuffle, starts an actor per partition and order: 5.5 s where tasks take
    0.6 s (2 cores, 256 rows of 80 kB), and an actor that dies takes its rows with it. Ray makes
    the output of a lost task again.
    """
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # it warns about hidden progress bars
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_no_progress_timeout_s = -1  # else 30 minutes; a file may take a worker hours
    context.target_max_block_size = 1 << 40  # a piece of the sort stays one block
    context.shuffle_strategy = ShuffleStrategy.SORT_SHUFFLE_PULL_BASED
    # Ray 2.60 has no other way to say ``max_retries`` than the one it warns about.
    warnings.filterwarnings("ignore", "`ray_remote_args` is deprecated")
    for name in _ERRORS_TOLD_TWICE:
        logging.getLogger(name).setLevel(logging.CRITICAL)


def result_tables(dataset: ray.data.Dataset) -> Iterable[pa.Table]:
    try:
        for reference in dataset.to_arrow_refs():
            yield ray.get(reference)
    except RayError as error:
        raise cluster_error("the workers that count must stay alive", error, AGAIN) from error


def packed_row(numbers: dict[str, int], **arrays: np.ndarray) -> pa.Table:
    """Return one row: columns of numbers, and int64 arrays as bytes.

    Lists are four times as slow to sort.
    """
    columns = {name: pa.array([value], pa.int64()) for name, value in numbers.items()}
    packed = {n: pa.array([x.tobytes()], pa.large_binary()) for n, x in arrays.items()}
    return pa.table(columns | packed)


def unpacked(rows: pa.Table, column: str, row: int) -> np.ndarray:
    return np.frombuffer(rows[column][row].as_buffer(), np.int64)


def default_block_tokens(tokens: int, workers: int) -> int:
    """Return a block size that gives every worker work, and no table beyond about 1 GB."""
    return min(max(math.ceil(tokens / workers), _MIN_BLOCK_TOKENS), _MAX_BLOCK_TOKENS)


def _numbered(ranges: Sequence[tuple[int, int]]) -> ray.data.Dataset:
    """Return a row for each range, which is a block and so a task."""
    rows = [{"number": i, "low": low, "high": high} for i, (low, high) in enumerate(ranges)]
    return ray.data.from_items(rows, override_num_blocks=max(1, len(rows)))


def _collect(dataset: ray.data.Dataset, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sorted frequent keys and counts, once every row is accounted for."""
    keys, support = [NO_KEYS], [NO_KEYS]
    seen = set()
    for rows in result_tables(dataset):
        for row in range(rows.num_rows):
            partition = rows["partition"][row].as_py()
            blocks_seen = unpacked(rows, "blocks", row)
            if partition in seen or not np.array_equal(blocks_seen, np.arange(blocks)):
                rule = f"each of {blocks} blocks must reach partition {partition} once"
                raise ClusterError(rule, f"{len(blocks_seen)} did", AGAIN)
            seen.add(partition)
            keys.append(unpacked(rows, "keys", row))
            support.append(unpacked(rows, "counts", row))
    if len(seen) != PARTITIONS:
        raise ClusterError(f"{PARTITIONS} partitions must come back", len(seen), AGAIN)
    return sort_pairs(np.concatenate(keys), np.concatenate(support))


@dataclass(frozen=True)
class ClusterCounter:
    """Count on the running Ray cluster.

    Attributes:
        corpus: What is counted.
        block_tokens: Tokens of a task; None takes ``default_block_tokens``.
        kept: Counts an order unless an earlier run has left it, and gives its keys and counts.
        progress: Receives tokens read, tokens in all, and what is counted, by whole passes.
        longest: Most tokens of an n-gram.
    """

    corpus: Corpus
    block_tokens: int | None = None
    kept: Kept = lambda _, count: count()
    progress: Progress | None = None
    longest: int = LONGEST

    def count(self, tau: int) -> NgramCounts:
        """Count everything that occurs at least ``tau`` times.

        It is what :func:`umim_core.mining.counting.count_ngrams` counts, whatever the blocks.
        """
        prepare_ray_data()
        counts, reference = NgramCounts({}, {}, tau), ray.put(self.corpus)
        for order in orders_to(self.longest):
            counted = self.kept(order, partial(self._count_order, reference, order, counts))
            counts.keys[order], counts.support[order] = counted
        return counts

    def _count_order(self, reference: ray.ObjectRef, order: int, counts: NgramCounts) -> Counted:
        size, cpus = int(self.corpus.offsets[-1]), cluster_cpus()
        self._tell(0, f"{order}-grams")
        block = self.block_tokens or default_block_tokens(size, cpus)
        ranges = list(segment_ranges(self.corpus.offsets, block))
        indexes, tau = ray.put(rank_indexes(counts.keys, order)), counts.tau

        def local(batch: dict[str, np.ndarray]) -> Iterable[pa.Table]:
            opened = ray.get(reference)
            tables = ray.get(indexes)
            for block, low, high in zip(batch["number"], batch["low"], batch["high"], strict=True):
                counter = OrderCounter(order, tables, excluded_mask(opened.excluded), threads=1)
                counter.add(opened.open(), opened.offsets, int(low), int(high))
                for partition in range(PARTITIONS):
                    keys, support = counter.table.items(partition)
                    where = {"partition": partition}
                    yield packed_row(where, blocks=np.array([block]), keys=keys, counts=support)

        def total(rows: pa.Table) -> Iterable[pa.Table]:
            groups: dict[int, list[int]] = {}
            for row, partition in enumerate(rows["partition"].to_pylist()):
                groups.setdefault(partition, []).append(row)
            for partition, members in groups.items():
                blocks = np.sort(np.concatenate([unpacked(rows, "blocks", row) for row in members]))
                pairs = [
                    (unpacked(rows, "keys", row), unpacked(rows, "counts", row)) for row in members
                ]
                table = PartitionedCounts()
                table.reserve(partition, sum(keys.size for keys, _ in pairs))
                for keys, support in pairs:
                    table.add(partition, keys, support)
                keys, support = table.items(partition, tau)
                yield packed_row({"partition": partition}, blocks=blocks, keys=keys, counts=support)

        pieces = min(PARTITIONS, cpus * _PIECES_PER_CPU)
        dataset = (
            _numbered(ranges)
            .map_batches(local, batch_size=None, zero_copy_batch=True, max_retries=TASK_RESTARTS)
            .sort("partition", boundaries=[PARTITIONS * k // pieces for k in range(1, pieces)])
            .map_batches(total, batch_size=None, batch_format="pyarrow", max_retries=TASK_RESTARTS)
        )
        counted = _collect(dataset, len(ranges))
        self._tell(size, f"{order}-grams")
        return counted

    def _tell(self, done: int, text: str) -> None:
        if self.progress is not None:
            self.progress(done, int(self.corpus.offsets[-1]), text)
