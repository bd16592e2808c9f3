"""Mining against DuckDB, Polars and Python's Counter: a table, then one JSON line.

    python benchmarks/mining.py --out docs/results/mining.json
    python benchmarks/mining.py --ids tokens.npy --ray more_tokens.npy

All sides find the same grams (orders 2 to 4, counts, segments of 512 tokens), checked in the run;
one of ours goes on to 16.
Gates (P1): equal to Counter; 2.5 times DuckDB, both with two threads; 5 times Counter on one core;
two threads 1.6 times one; to 16 tokens 0.6 of the speed to 4; memory within its bound; the Ray path
0.6 of the bare kernel (``--ray``, from 1e8 tokens on). DuckDB runs in two formulations, of which
the gate takes the faster; on columns of ids it was slower by a quarter, and Counter on tuples by a
third.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks.common import THREADS, Benchmark, Gate, Report, at_least, at_most, fresh
from benchmarks.corpus import CORPUS_OPTIONS, Ids, ids_file, open_ids
from benchmarks.processes.mining_process import LENGTH, whole_segments
from benchmarks.timing import alternate, ratio, spread
from umim_core.mining.counting import count_ngrams
from umim_core.rules.grams import MAX_LONGEST
from umim_core.text.token_ids import UniformOffsets

if TYPE_CHECKING:
    from benchmarks.peers.mining_peers import Grams

OURS, OURS_1 = "numba, 2 threads", "numba, 1 thread"
LONG: Final = f"{OURS}, to 16 tokens"
DUCKDB, DUCKDB_APRIORI = "DuckDB, packed ids", "DuckDB, packed, Apriori"
POLARS, COUNTER = "Polars, packed ids", "Counter, packed ids"
PREFIX = f"{OURS_1}, prefix"  # stands in for OURS_1 where Counter reads a prefix only
BOUND_TOKENS_PER_CORE: Final = 33e6  # memory accesses per token; docs/performance.md, P1
RAY_TOKENS: Final = 10**8


@dataclass(frozen=True)
class Side:
    """One way to find the grams."""

    run: Callable[[], Any]
    read: Callable[[Any], Grams]
    tokens: int
    cores: int = 1


def make_sides(ids: Ids, tau: int, counter_tokens: int) -> dict[str, Side]:
    """Return all sides, on ids in whole segments [T], of which Counter may read a prefix only."""
    from benchmarks.peers import mining_peers as peers  # Polars reads its threads at import

    rows = np.array(ids, dtype=np.int32).reshape(-1, LENGTH)
    few = rows[: max(1, counter_tokens // LENGTH)]
    bits = peers.id_bits(int(rows.max()))

    def ours(part: Ids, **how: Any) -> Side:
        offsets = UniformOffsets(LENGTH, len(part))
        run = partial(count_ngrams, part.reshape(-1), offsets, tau, **how)
        read = partial(peers.grams_of_counts, bits=bits)
        return Side(run, read, part.size, how.get("threads", 1))

    def packed(count: Callable[[Ids, int, int], Grams]) -> Side:
        return Side(partial(count, rows, bits, tau), lambda grams: grams, rows.size, THREADS)

    counter = partial(peers.counter_packed, few, bits, tau)
    sides = {
        OURS: ours(rows, threads=THREADS),
        OURS_1: ours(rows, threads=1),
        LONG: ours(rows, threads=THREADS, longest=MAX_LONGEST),
        DUCKDB: packed(peers.duckdb_packed),
        DUCKDB_APRIORI: packed(peers.duckdb_apriori),
        POLARS: packed(peers.polars_groups),
        COUNTER: Side(counter, peers.grams_of_integers, few.size),
    }
    return sides | ({PREFIX: ours(few, threads=1)} if len(few) < len(rows) else {})


def compare(sides: dict[str, Side], rounds: int) -> Report:
    """Run all sides in alternation and check that those that read the same find the same."""
    from benchmarks.peers.mining_peers import same

    firsts: dict[int, Grams] = {}  # by tokens read
    equal: dict[str, bool] = {}

    def warmed(name: str, result: Any) -> None:
        grams = sides[name].read(result)
        equal[name] = same(grams, firsts.setdefault(sides[name].tokens, grams))

    seconds = alternate({name: side.run for name, side in sides.items()}, rounds, warmed)
    whole = firsts[sides[OURS].tokens]
    return {
        "corpus": {"tokens": sides[OURS].tokens, "segment_length": LENGTH},
        "rules": {str(n): len(counts) for n, (_, counts) in whole.items()},
        "same": equal,
        "sides": {
            name: {
                "cores": side.cores,
                "tokens": side.tokens,
                "seconds": spread(seconds[name]),
                "tokens_per_s": side.tokens / spread(seconds[name])["median"],
            }
            for name, side in sides.items()
        },
        "ratios": ratios(seconds),
    }


def ratios(seconds: dict[str, list[float]]) -> Report:
    """Return how many times as long each peer takes as ours, on as many cores."""
    one_core = PREFIX if PREFIX in seconds else OURS_1
    base = dict.fromkeys((DUCKDB, DUCKDB_APRIORI, POLARS, OURS_1, LONG), OURS) | {COUNTER: one_core}
    return {
        name: {"against": ours, **ratio(seconds, name, ours)}
        for name, ours in base.items()
        if name in seconds
    }


def gates(report: Report) -> dict[str, Gate]:
    """Return value, limit and verdict of every gate that applies."""
    by_name = report["ratios"]

    def times(name: str) -> float:
        return float(by_name[name]["median"])

    per_core = max(
        report["sides"][name]["tokens_per_s"] / report["sides"][name]["cores"]
        for name in (OURS, OURS_1)
    )
    measured, same = report["memory"], report["same"]
    counted_same = same[COUNTER] and same.get(PREFIX, True)
    gates = {
        "equal_to_counter": at_least(float(counted_same), 1.0),
        "times_duckdb": at_least(min(times(DUCKDB), times(DUCKDB_APRIORI)), 2.5),
        "times_counter_per_core": at_least(times(COUNTER), 5.0),
        "two_threads_times_one": at_least(times(OURS_1), 1.6),
        "memory_of_bound": at_most(measured["peak_bytes"] / measured["bound_bytes"], 1.0),
        "tokens_per_s_and_core_below_bound": at_most(per_core, BOUND_TOKENS_PER_CORE),
    }
    if LONG in by_name:
        gates["speed_to_16_of_4"] = at_least(1 / times(LONG), 0.6)
    ray = report["ray"]
    if ray is not None and ray["tokens"] >= RAY_TOKENS:
        gates["ray_of_kernel"] = at_least(ray["share"]["median"], 0.6)
    return gates


def run(options: argparse.Namespace, report: Report) -> None:
    """Compare all sides, then memory with its bound, then the Ray path."""
    file = ids_file(options)
    ids, _ = whole_segments(open_ids(file, options.tokens))
    report["tau"] = options.tau
    report |= compare(make_sides(ids, options.tau, options.counter_tokens), options.rounds)
    counted = {"ids": file, "tokens": options.tokens, "tau": options.tau}
    report["memory"] = fresh("processes.mining_process", what="count", **counted)
    report["ray"] = options.ray and fresh(
        "processes.mining_process",
        what="ray",
        ids=options.ray.resolve(),
        tokens=options.ray_tokens,
        tau=options.tau,
        rounds=options.ray_rounds,
    )


def equal(report: Report) -> bool:
    """Return whether all sides found the same, the cluster too."""
    return all(report["same"].values()) and (report["ray"] is None or report["ray"]["equal"])


main = Benchmark(
    name="mining",
    doc=__doc__,
    libraries=("duckdb", "numba", "numpy", "polars", "pyarrow"),
    options=CORPUS_OPTIONS
    | {
        "tau": 5,
        "rounds": 10,
        "counter_tokens": 1 << 24,
        "ray": Path,
        "ray_tokens": int,
        "ray_rounds": 3,
    },
    measure=run,
    gates=gates,
    equal=equal,
).main


if __name__ == "__main__":
    sys.exit(main())
