"""Table of a rule set: ``rules.parquet`` and the checks of its rows.

Columns ``n`` int8, ``ids`` list<int32>, ``count`` int64, sorted by (n, ids).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from umim_core.errors import ArtifactError, RuleSetError
from umim_core.rules.grams import ORDERS
from umim_core.text.token_ids import MAX_TOKEN_ID

TABLE_SCHEMA: Final = pa.schema(
    [("n", pa.int8()), ("ids", pa.list_(pa.int32())), ("count", pa.int64())]
)
MAX_RULES: Final = 100_000_000
_ROW_BYTES: Final = 13  # of n, count and the list's offset
_FREE_BYTES: Final = 64 << 20
_MOST_EXPANSION: Final = 64
Ids = NDArray[np.int32]
Counts = NDArray[np.int64]


def write_table(
    path: Path,
    ids_by_order: dict[int, Ids],
    support_by_order: dict[int, Counts],
    compression_level: int | None = None,
) -> None:
    """Write rules [R_n, n] per order and their counts [R_n] as Parquet.

    ``compression_level`` is of zstd; None for its own.
    """
    sizes = [len(ids_by_order[n]) for n in ORDERS]
    table = pa.table(
        {
            "n": np.repeat(np.array(ORDERS, np.int8), sizes),
            "ids": pa.concat_arrays([_list_array(ids_by_order[n]) for n in ORDERS]),
            "count": np.concatenate([support_by_order[n] for n in ORDERS]),
        },
        schema=TABLE_SCHEMA,
    )
    try:
        pq.write_table(table, path, compression="zstd", compression_level=compression_level)
    except OSError as error:
        raise ArtifactError(
            f"{path} ({table.nbytes} bytes before compression) must be writable",
            os.strerror(error.errno) if error.errno else str(error),
            "Free space or choose another root.",
        ) from error


def _list_array(ids: Ids) -> pa.ListArray:
    offsets = np.arange(len(ids) + 1, dtype=np.int32) * ids.shape[1]
    return pa.ListArray.from_arrays(offsets, pa.array(ids.reshape(-1), pa.int32()))


def read_table(path: Path) -> tuple[dict[int, Ids], dict[int, Counts]]:
    """Read what :func:`write_table` wrote; the rows themselves are left to :func:`check_order`."""
    try:
        with pq.ParquetFile(path) as file:
            rows = file.metadata.num_rows
            if not file.schema_arrow.equals(TABLE_SCHEMA) or rows > MAX_RULES:
                raise RuleSetError(
                    f"{path} must have the columns n int8, ids list<int32>, count int64 and at "
                    f"most {MAX_RULES} rows",
                    f"{rows} rows of {file.schema_arrow.to_string()}",
                    "Mine again.",
                )
            _check_size(path, file.metadata)
            table = file.read()
            table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:  # a name that is no UTF-8, too
        raise RuleSetError(f"{path} must be a Parquet file", str(error), "Mine again.") from error
    lists = table["ids"].combine_chunks()
    if any(column.null_count for column in table.columns) or lists.values.null_count:
        raise RuleSetError(f"{path} must hold no nulls", "nulls", "Mine again.")
    orders, counts = (_numbers(table[name].combine_chunks()) for name in ("n", "count"))
    sizes, flat = np.diff(_numbers(lists.offsets)), _numbers(lists.flatten())
    if not np.isin(orders, ORDERS).all() or (sizes != orders).any() or (np.diff(orders) < 0).any():
        raise RuleSetError(
            f"{path} must hold rules of 2, 3 or 4 ids, sorted by n", "other rows", "Mine again."
        )
    starts = np.concatenate([[0], np.cumsum(sizes)])
    ids, support = {}, {}
    for n in ORDERS:
        low, high = np.searchsorted(orders, [n, n + 1])
        ids[n] = flat[starts[low] : starts[high]].reshape(-1, n)
        support[n] = counts[low:high]
    return ids, support


def _check_size(path: Path, metadata: pq.FileMetaData) -> None:
    """Refuse a file that would take far more memory than it has bytes, before any is taken.

    Rules all differ, so a file of them does not shrink without end: the shipped sets take about 6
    bytes a rule on disk and 25 in memory. Runs of equal values in a forged file do.
    """
    columns = [
        metadata.row_group(group).column(column)
        for group in range(metadata.num_row_groups)
        for column in range(metadata.num_columns)
    ]
    ids = sum(column.num_values for column in columns if column.path_in_schema.startswith("ids"))
    pages = sum(column.total_uncompressed_size for column in columns)
    needed = max(metadata.num_rows * _ROW_BYTES + ids * 4, pages)
    limit = max(_FREE_BYTES, _MOST_EXPANSION * path.stat().st_size)
    if needed > limit:
        raise RuleSetError(
            f"{path} must take at most {limit} bytes of memory",
            f"{needed} bytes, {metadata.num_rows} rows with {ids} ids",
            "This is no file of rules; mine again.",
        )


def _numbers(array: pa.Array) -> NDArray[Any]:
    """View signed numbers without nulls; the array's own methods import pandas: half a second."""
    kind = np.dtype(f"i{array.type.bit_width // 8}")
    data = array.buffers()[1]
    if data is None:  # an empty array may have none
        return np.zeros(0, kind)
    return np.frombuffer(data, kind, count=array.offset + len(array))[array.offset :]


def check_order(n: int, ids: Ids | None, support: Counts | None, tau: int | None) -> None:
    """Check the rules [R, n] (int32) of order n and their counts [R] (int64), at least tau or 1."""
    if ids is None or support is None or ids.ndim != 2 or ids.shape != (len(support), n):
        shape = None if ids is None else ids.shape
        raise RuleSetError(f"rules of order {n} must have {n} ids and a count each", shape)
    if ids.dtype != np.int32 or support.dtype != np.int64:
        raise RuleSetError("rule ids must be int32 and counts int64", f"{ids.dtype}")
    if not len(ids):
        return
    if ids.min() < 0 or ids.max() > MAX_TOKEN_ID:
        raise RuleSetError(
            f"rule ids must lie in 0..{MAX_TOKEN_ID}", f"{ids.min()}..{ids.max()}", "Mine again."
        )
    if support.min() < (1 if tau is None else tau):
        raise RuleSetError("every count must reach tau", int(support.min()), "Mine again.")
    unequal = ids[1:] != ids[:-1]
    first = unequal.argmax(axis=1)
    rows = np.arange(len(ids) - 1)
    rising = unequal.any(axis=1) & (ids[1:][rows, first] > ids[:-1][rows, first])
    if not rising.all():
        at = int(np.flatnonzero(~rising)[0])
        raise RuleSetError(
            "rules must be sorted and all different", ids[at + 1].tolist(), "Mine again."
        )
