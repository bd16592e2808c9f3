"""Mining against DuckDB, Polars and Python's Counter: a table, then one JSON line.

    python -m benchmarks.mining --out docs/results/mining.json
    python -m benchmarks.mining --ids tokens.npy

All sides find the same grams (orders 2 to 4, counts, segments of 512 tokens), checked in the run;
one of ours goes on to 16. Peers count keys of 64 bits, into which numpy packs the ids of a gram
(each of at most 16 bits): faster in every one of them than columns or tuples of ids, which were
measured, and dropped, at d77cff53, as was DuckDB with a semi-join on frequent heads and tails at
a2247891. That time counts. Gates: P1 of docs/performance.md, and 0.6 of the speed to 4 tokens when
counting to 16.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from benchmarks.runner import (
    THREADS,
    Benchmark,
    Gates,
    Report,
    alternate,
    fresh,
    memory_of,
    rate,
    ratio,
)
from benchmarks.subjects import SEGMENT, docstring_ids, open_ids, whole_segments
from umim_core.config.rule_options import RuleOptions
from umim_core.errors import CorpusError, require
from umim_core.mining.counting import count_ngrams
from umim_core.mining.mining_memory import mining_memory, sample_shares
from umim_core.rules.grams import MAX_LONGEST, ORDERS, NgramCounts
from umim_core.text.token_ids import segment_borders

OURS_1 = "numba, 1 thread"
OURS = f"numba, {THREADS} threads" if THREADS > 1 else OURS_1
LONG: Final = f"{OURS}, to 16 tokens"
DUCKDB, POLARS, COUNTER = "DuckDB, packed ids", "Polars, packed ids", "Counter, packed ids"
BOUND_TOKENS_PER_CORE: Final = 33e6  # memory accesses per token; docs/performance.md, P1
MAX_BITS: Final = 16
Rows = NDArray[np.integer]  # ids in segments of one length [S, L]
Keys = NDArray[np.uint64]
Counts = tuple[Keys, NDArray[np.integer]]  # keys [R], counts [R]
Grams = dict[int, Counts]  # by order


def packed(rows: Rows, order: int, bits: int) -> Keys:
    """Return the keys of all grams of one order that lie within a row."""
    stop = rows.shape[1] - order + 1
    keys = rows[:, :stop].astype(np.uint64)
    for step in range(1, order):
        keys <<= np.uint64(bits)
        keys |= rows[:, step : stop + step].astype(np.uint64)
    return keys.ravel()


def duckdb_counts(grams: Iterable[Keys], tau: int) -> Iterator[Counts]:
    import duckdb  # where it is used: it complains at the end of a process that imported it

    query = "SELECT k, count(*) AS c FROM grams GROUP BY k HAVING count(*) >= ?"
    with duckdb.connect(config={"threads": THREADS}) as connection:
        for keys in grams:
            connection.register("grams", pa.table({"k": keys}))
            table = connection.sql(query, params=[tau]).to_arrow_table()
            yield table["k"].to_numpy(), table["c"].to_numpy()


def polars_counts(grams: Iterable[Keys], tau: int) -> Iterator[Counts]:
    """Count with group_by of the streaming engine, which is the faster one here."""
    import polars as pl  # reads its threads at import

    for keys in grams:
        groups = pl.LazyFrame({"k": keys}).group_by("k").len("c")
        frame = groups.filter(pl.col("c") >= tau).collect(engine="streaming")
        yield frame["k"].to_numpy(), frame["c"].to_numpy()


def counter_counts(grams: Iterable[Keys], tau: int) -> Iterator[dict[int, int]]:
    """Count integers that numpy has packed: the fastest use of Counter, and the sides' oracle."""
    for keys in grams:
        yield {key: count for key, count in Counter(keys.tolist()).items() if count >= tau}


def of_counter(counts: dict[int, int]) -> Counts:
    return np.array(list(counts), np.uint64), np.array(list(counts.values()), np.int64)


def same(one: Grams, other: Grams) -> bool:
    """Return whether two results hold the same grams with the same counts, in any order."""

    def ordered(grams: Grams) -> list[NDArray[Any]]:
        pairs = [(grams[n], np.argsort(grams[n][0])) for n in ORDERS]
        return [values[order] for found, order in pairs for values in found]

    return all(map(np.array_equal, ordered(one), ordered(other)))


@dataclass(frozen=True)
class Side:
    run: Callable[[], Any]
    read: Callable[[Any], Grams]
    cores: int


def make_sides(ids: NDArray[np.integer], tau: int) -> dict[str, Side]:
    """Return all sides, on ids in whole segments [T]."""
    rows = np.array(ids, dtype=np.int32).reshape(-1, SEGMENT)
    bits = max(1, int(rows.max()).bit_length())
    rule = f"the peers' keys hold ids below {1 << MAX_BITS}"
    require(bits <= MAX_BITS, CorpusError, rule, int(rows.max()))

    def of_counts(counts: NgramCounts) -> Grams:
        return {n: (packed(counts.ids(n), n, bits), counts.support[n]) for n in ORDERS}

    def ours(threads: int, **how: Any) -> Side:
        offsets = segment_borders(rows.size, SEGMENT)
        run = partial(count_ngrams, rows.reshape(-1), offsets, tau, threads=threads, **how)
        return Side(run, of_counts, threads)

    def peer(
        count: Callable[[Iterable[Keys], int], Iterable[Any]],
        read: Callable[[Any], Counts] = tuple,
        cores: int = THREADS,
    ) -> Side:
        def run() -> list[Any]:
            return list(count((packed(rows, n, bits) for n in ORDERS), tau))

        return Side(run, lambda found: dict(zip(ORDERS, map(read, found), strict=True)), cores)

    return {
        OURS: ours(THREADS),
        OURS_1: ours(1),
        LONG: ours(THREADS, longest=MAX_LONGEST),
        DUCKDB: peer(duckdb_counts),
        POLARS: peer(polars_counts),
        COUNTER: peer(counter_counts, of_counter, cores=1),
    }


def compare(sides: dict[str, Side], tokens: int, rounds: int) -> Report:
    """Run all sides in alternation on so many tokens and check that they find the same."""
    first: Grams = {}
    equal: dict[str, bool] = {}

    def warmed(name: str, result: Any) -> None:
        grams = sides[name].read(result)
        if not equal:
            first.update(grams)
        equal[name] = same(grams, first)

    seconds = alternate({name: side.run for name, side in sides.items()}, rounds, warmed)
    against = dict.fromkeys((DUCKDB, POLARS, OURS_1, LONG), OURS)
    against[COUNTER] = OURS_1  # on as many cores
    return {
        "corpus": {"tokens": tokens, "segment_length": SEGMENT},
        "rules": {str(n): len(counts) for n, (_, counts) in first.items()},
        "same": equal,
        "sides": {
            name: {"cores": side.cores, "tokens": tokens, **rate(seconds[name], tokens)}
            for name, side in sides.items()
        },
        "ratios": {
            name: {"against": ours, **ratio(seconds, name, ours)}
            for name, ours in against.items()
            if name in seconds and name != ours
        },
    }


def memory(ids: Path, tau: int) -> Report:
    warm, borders = whole_segments(np.arange(100 * SEGMENT, dtype=np.int32) % 7)
    count_ngrams(warm, borders, 2, threads=THREADS)  # loads the compiled loops
    text, offsets = whole_segments(open_ids(ids))
    search = RuleOptions(tau=tau)
    bound = mining_memory(
        len(text), search, sample_shares(text, offsets, search, threads=THREADS), threads=THREADS
    )
    grown, _ = memory_of(lambda: count_ngrams(text, offsets, tau, threads=THREADS))
    return {"peak_bytes": grown, "bound_bytes": bound}


def gates(report: Report) -> Gates:
    times = {name: float(figures["median"]) for name, figures in report["ratios"].items()}
    sides, memory = report["sides"], report["memory"]
    per_core = max(sides[name]["tokens_per_s"] / sides[name]["cores"] for name in (OURS, OURS_1))
    judged = Gates()
    judged.at_least("equal_to_counter", report["same"][COUNTER], 1.0)
    judged.at_least("times_duckdb", times[DUCKDB], 2.5)
    judged.at_least("times_counter_per_core", times[COUNTER], 5.0)
    judged.at_most("memory_of_bound", memory["peak_bytes"] / memory["bound_bytes"], 1.0)
    judged.at_most("tokens_per_s_and_core_below_bound", per_core, BOUND_TOKENS_PER_CORE)
    if sides[OURS]["cores"] == 2:
        judged.at_least("two_threads_times_one", times[OURS_1], 1.6)
    judged.at_least("speed_to_16_of_4", 1 / times[LONG], 0.6)
    return judged


def run(options: argparse.Namespace, report: Report) -> None:
    file, tau = options.ids or docstring_ids(), options.tau
    ids, _ = whole_segments(open_ids(file))
    report["tau"] = tau
    report |= compare(make_sides(ids, tau), len(ids), options.rounds)
    report["memory"] = fresh(memory, file, tau)
    report["equal"] = all(report["same"].values())


BENCHMARK: Final = Benchmark(
    libraries=("duckdb", "numba", "numpy", "polars", "pyarrow"),
    options={"ids": Path, "tau": 5, "rounds": 10},
    measure=run,
    gates=gates,
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
