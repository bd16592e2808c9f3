"""Frequent n-grams by other means: DuckDB, Polars and Python's Counter.

All of them return the same grams. But for the plain SQL over four columns, the ids of a gram are
packed into one 64-bit key (four ids of at most 16 bits), which is faster in every peer. numpy packs
them; that time counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import chain
from typing import Final

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from benchmarks.common import THREADS
from umim_core.rules.grams import ORDERS, NgramCounts

MAX_BITS: Final = 16
Rows = NDArray[np.integer]  # segments of one length [S, L]
Keys = NDArray[np.uint64]
PackedCounts = dict[int, tuple[Keys, NDArray[np.integer]]]
ColumnCounts = dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]]  # ids [R, n], counts [R]
TupleCounts = dict[int, dict[tuple[int, ...], int]]
Grams = dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]]

_GROUP_COLUMNS: Final = (
    "SELECT {names}, count(*) AS c FROM grams WHERE t{last} >= 0"
    " GROUP BY {names} HAVING count(*) >= {tau}"
)
_GROUP: Final = "SELECT k, count(*) AS c FROM grams GROUP BY k HAVING count(*) >= {tau}"
_GROUP_SEMI: Final = (
    "SELECT k, count(*) AS c FROM grams"
    " SEMI JOIN frequent AS head ON grams.k >> {bits} = head.k"
    " SEMI JOIN frequent AS tail ON (grams.k & {mask}) = tail.k"
    " GROUP BY grams.k HAVING count(*) >= {tau}"
)


def id_bits(largest_id: int) -> int:
    """Return the bits of an id."""
    bits = max(1, int(largest_id).bit_length())
    if bits > MAX_BITS:
        raise SystemExit(f"the peers' keys hold ids below {1 << MAX_BITS}, not {largest_id}")
    return bits


def packed(rows: Rows, order: int, bits: int) -> Keys:
    """Return the keys of all grams of one order that lie within a row."""
    stop = rows.shape[1] - order + 1
    keys = rows[:, :stop].astype(np.uint64)
    for step in range(1, order):
        keys <<= np.uint64(bits)
        keys |= rows[:, step : stop + step].astype(np.uint64)
    return keys.ravel()


def duckdb_columns(rows: Rows, tau: int) -> ColumnCounts:
    """Count every gram with GROUP BY over columns of ids; -1 stands behind the end of a row."""
    length, longest = rows.shape[1], ORDERS[-1]
    padded = np.full((len(rows), length + longest - 1), -1, dtype=np.int32)
    padded[:, :length] = rows
    columns = {f"t{step}": padded[:, step : step + length].ravel() for step in range(longest)}
    counts_by_order: ColumnCounts = {}
    with duckdb.connect(config={"threads": THREADS}) as connection:
        connection.register("grams", pa.table(columns))
        for n in ORDERS:
            names = [f"t{step}" for step in range(n)]
            query = _GROUP_COLUMNS.format(names=", ".join(names), last=n - 1, tau=tau)
            table = connection.sql(query).to_arrow_table()
            ids = np.stack([table[name].to_numpy() for name in names], axis=1)
            counts_by_order[n] = ids.astype(np.int64), table["c"].to_numpy()
    return counts_by_order


def duckdb_packed(rows: Rows, bits: int, tau: int) -> PackedCounts:
    """Count every gram of each order with GROUP BY."""
    return _grouped(rows, bits, tau, _GROUP)


def duckdb_apriori(rows: Rows, bits: int, tau: int) -> PackedCounts:
    """Count with GROUP BY those grams alone whose (n-1)-grams are both frequent."""
    return _grouped(rows, bits, tau, _GROUP_SEMI)


def _grouped(rows: Rows, bits: int, tau: int, longer: str) -> PackedCounts:
    """Count the grams of each order with a query, those of the first order with GROUP BY."""
    counts_by_order: PackedCounts = {}
    with duckdb.connect(config={"threads": THREADS}) as connection:
        for n in ORDERS:
            connection.register("grams", pa.table({"k": packed(rows, n, bits)}))
            query = _GROUP if n == ORDERS[0] else longer
            query = query.format(tau=tau, bits=bits, mask=(1 << (n - 1) * bits) - 1)
            table = connection.sql(query).to_arrow_table()
            counts_by_order[n] = table["k"].to_numpy(), table["c"].to_numpy()
            connection.register("frequent", pa.table({"k": counts_by_order[n][0]}))
    return counts_by_order


def polars_groups(rows: Rows, bits: int, tau: int) -> PackedCounts:
    """Count every gram with group_by of the streaming engine, which is the faster one here."""
    counts_by_order: PackedCounts = {}
    for n in ORDERS:
        groups = pl.LazyFrame({"k": packed(rows, n, bits)}).group_by("k").len("c")
        frame = groups.filter(pl.col("c") >= tau).collect(engine="streaming")
        counts_by_order[n] = frame["k"].to_numpy(), frame["c"].to_numpy()
    return counts_by_order


def counter_tuples(rows: Rows, tau: int) -> TupleCounts:
    """Count tuples with Python alone; the oracle of the other sides."""
    segments = rows.tolist()
    counts_by_order: TupleCounts = {}
    for n in ORDERS:
        grams = chain.from_iterable(
            zip(*(segment[step:] for step in range(n)), strict=False) for segment in segments
        )
        counts = Counter(grams)
        counts_by_order[n] = {gram: count for gram, count in counts.items() if count >= tau}
    return counts_by_order


def counter_packed(rows: Rows, bits: int, tau: int) -> dict[int, dict[int, int]]:
    """Count integers that numpy has packed: the fastest use of Counter."""
    return {
        n: {
            key: count
            for key, count in Counter(packed(rows, n, bits).tolist()).items()
            if count >= tau
        }
        for n in ORDERS
    }


def grams_of_counts(counts: NgramCounts) -> Grams:
    """Return our result in the common form: per order the grams [R, n], rising, and counts [R]."""
    return {n: (counts.ids(n).astype(np.int64), counts.support[n]) for n in ORDERS}


def grams_of_columns(counts_by_order: ColumnCounts) -> Grams:
    """Return the result of a peer with columns in the common form."""
    grams: Grams = {}
    for n, (ids, counts) in counts_by_order.items():
        order = np.lexsort(ids.T[::-1])
        grams[n] = ids[order], counts[order]
    return grams


def grams_of_packed(counts_by_order: PackedCounts, bits: int) -> Grams:
    """Return the result of a peer with packed keys in the common form."""
    grams: Grams = {}
    mask = np.uint64((1 << bits) - 1)
    for n, (keys, counts) in counts_by_order.items():
        order = np.argsort(keys)
        columns = [(keys[order] >> np.uint64(bits * (n - 1 - i))) & mask for i in range(n)]
        grams[n] = np.stack(columns, axis=1).astype(np.int64), counts[order].astype(np.int64)
    return grams


def grams_of_integers(counts_by_order: Mapping[int, Mapping[int, int]], bits: int) -> Grams:
    """Return the result of a peer with packed keys in dictionaries in the common form."""
    arrays = {
        n: (
            np.fromiter(counts.keys(), np.uint64, len(counts)),
            np.fromiter(counts.values(), np.int64, len(counts)),
        )
        for n, counts in counts_by_order.items()
    }
    return grams_of_packed(arrays, bits)


def grams_of_tuples(counts_by_order: TupleCounts) -> Grams:
    """Return the result of the oracle in the common form."""
    grams: Grams = {}
    for n, counts in counts_by_order.items():
        ordered = sorted(counts)
        grams[n] = (
            np.array(ordered, dtype=np.int64).reshape(-1, n),
            np.array([counts[gram] for gram in ordered], dtype=np.int64),
        )
    return grams


def same(one: Grams, other: Grams) -> bool:
    """Return whether two results hold the same grams with the same counts."""
    return one.keys() == other.keys() and all(
        np.array_equal(a, b) for n in one for a, b in zip(one[n], other[n], strict=True)
    )
