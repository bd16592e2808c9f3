"""Shared parts of the counting plans on Ray Data: corpus, rows of packed arrays, settings."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import ray
from ray.data import DataContext
from ray.data.context import ShuffleStrategy
from ray.exceptions import RayError

from tasks.cluster.worker_errors import cluster_error
from tasks.storage.node_files import local_copy
from umim_core.text.token_files import TokenFiles
from umim_core.text.token_ids import Offsets, Tokens

AGAIN = "Run the same command again; finished orders are kept."
TASK_RESTARTS = 10  # Ray Data's default is no limit: a task that kills its worker would never end
# What these log is raised as well, as a typed error.
_ERRORS_TOLD_TWICE = (
    "ray.data.exceptions",
    "ray.data._internal.execution.streaming_executor_state",
)


@dataclass(frozen=True)
class Corpus:
    """Tokens that every worker can read.

    Attributes:
        tokens: Folder of token files, which all nodes see or fetch from storage, or an array.
        offsets: Segment borders [num_segments + 1].
        excluded: Ids that take part in no gram.
    """

    tokens: Path | np.ndarray
    offsets: Offsets
    excluded: tuple[int, ...] = ()

    def open(self) -> Tokens:
        """Return the tokens, memory-mapped where they are files."""
        if isinstance(self.tokens, Path):
            return TokenFiles.open(local_copy(self.tokens))
        return self.tokens


def cluster_cpus() -> int:
    """Return the CPU cores of the running cluster, at least 1."""
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
    """Run a plan and yield its blocks."""
    try:
        for reference in dataset.to_arrow_refs():
            yield ray.get(reference)
    except RayError as error:
        raise cluster_error("the workers that count must stay alive", error, AGAIN) from error


def packed_row(number: dict[str, int], **arrays: np.ndarray) -> pa.Table:
    """Return one row: a numbered column, and int64 arrays as bytes.

    Lists are four times as slow to sort.
    """
    columns = {name: pa.array([value], pa.int64()) for name, value in number.items()}
    packed = {n: pa.array([x.tobytes()], pa.large_binary()) for n, x in arrays.items()}
    return pa.table(columns | packed)


def unpacked(rows: pa.Table, column: str, row: int) -> np.ndarray:
    """Return an array of :func:`packed_row`, read-only."""
    return np.frombuffer(rows[column][row].as_buffer(), np.int64)
