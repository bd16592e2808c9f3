"""Frequent n-grams by other means: DuckDB, Polars and Python's Counter.

The ids of a gram are packed into one 64-bit key (four ids of at most 16 bits), which is faster in
every peer than columns or tuples of ids; these two were measured, and dropped, at d77cff53. numpy
packs them; that time counts.
"""

from __future__ import annotations

from collections import Counter
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
Grams = dict[int, tuple[Keys, NDArray[np.integer]]]  # packed ids [R] and counts [R] by order

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


def duckdb_packed(rows: Rows, bits: int, tau: int) -> Grams:
    """Count every gram of each order with GROUP BY."""
    return _grouped(rows, bits, tau, _GROUP)


def duckdb_apriori(rows: Rows, bits: int, tau: int) -> Grams:
    """Count with GROUP BY those grams alone whose (n-1)-grams are both frequent."""
    return _grouped(rows, bits, tau, _GROUP_SEMI)


def _grouped(rows: Rows, bits: int, tau: int, longer: str) -> Grams:
    """Count the grams of each order with a query, those of the first order with GROUP BY."""
    counts_by_order: Grams = {}
    with duckdb.connect(config={"threads": THREADS}) as connection:
        for n in ORDERS:
            connection.register("grams", pa.table({"k": packed(rows, n, bits)}))
            query = _GROUP if n == ORDERS[0] else longer
            query = query.format(tau=tau, bits=bits, mask=(1 << (n - 1) * bits) - 1)
            table = connection.sql(query).to_arrow_table()
            counts_by_order[n] = table["k"].to_numpy(), table["c"].to_numpy()
            connection.register("frequent", pa.table({"k": counts_by_order[n][0]}))
    return counts_by_order


def polars_groups(rows: Rows, bits: int, tau: int) -> Grams:
    """Count every gram with group_by of the streaming engine, which is the faster one here."""
    counts_by_order: Grams = {}
    for n in ORDERS:
        groups = pl.LazyFrame({"k": packed(rows, n, bits)}).group_by("k").len("c")
        frame = groups.filter(pl.col("c") >= tau).collect(engine="streaming")
        counts_by_order[n] = frame["k"].to_numpy(), frame["c"].to_numpy()
    return counts_by_order


def counter_packed(rows: Rows, bits: int, tau: int) -> dict[int, dict[int, int]]:
    """Count integers that numpy has packed: the fastest use of Counter, and the sides' oracle."""
    return {
        n: {
            key: count
            for key, count in Counter(packed(rows, n, bits).tolist()).items()
            if count >= tau
        }
        for n in ORDERS
    }


def grams_of_counts(counts: NgramCounts, bits: int) -> Grams:
    """Return our result in the form of the peers."""
    return {n: (packed(counts.ids(n), n, bits), counts.support[n]) for n in ORDERS}


def grams_of_integers(counts_by_order: dict[int, dict[int, int]]) -> Grams:
    """Return the result of Counter as arrays."""
    return {
        n: (
            np.fromiter(counts.keys(), np.uint64, len(counts)),
            np.fromiter(counts.values(), np.int64, len(counts)),
        )
        for n, counts in counts_by_order.items()
    }


def same(one: Grams, other: Grams) -> bool:
    """Return whether two results hold the same grams with the same counts, in any order."""
    return one.keys() == other.keys() and all(
        np.array_equal(a, b)
        for n in one
        for a, b in zip(_by_key(*one[n]), _by_key(*other[n]), strict=True)
    )


def _by_key(keys: Keys, counts: NDArray[np.integer]) -> tuple[Keys, NDArray[np.integer]]:
    order = np.argsort(keys)
    return keys[order], counts[order]
