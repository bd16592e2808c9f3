"""Cost of mining against tokens, each size predicted before it is measured.

    python benchmarks/mining_scaling.py --ids tokens.npy --repeat 10 --base base.npy \
        --out docs/results/mining_scaling.json

For each size the law of ``umim_core.cost.mining_law`` is fitted on a sample of at most the next
smaller power of ten of tokens, and its prediction is written to the result file before the
measurement starts. Gates (P1, P7): memory and time within 25 %. ``--repeat`` mines a
corpus repeated on segment borders: its rules at so many times tau must be those of the corpus
itself, within the predicted memory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.lib.format import open_memmap

from benchmarks.common import THREADS, Benchmark, Gate, Report, at_most, fresh, save
from benchmarks.corpus import CORPUS_OPTIONS, Ids, ids_file, open_ids
from benchmarks.processes.mining_process import LENGTH, load_counts, same_counts, whole_segments
from benchmarks.timing import ratio, spread
from umim_core.cost.mining_law import SAMPLE_TOKENS
from umim_core.rules.grams import ORDERS, NgramCounts
from umim_core.rules.ruleset import RuleSet

SIZES: Final = [10**6, 3_162_278, 10**7, 31_622_777, 10**8]
MAX_ERROR: Final = 0.25
_WARM_TOKENS: Final = 1 << 16
Save = Callable[[], None]


def decade_below(tokens: int) -> int:
    """Return the largest power of ten below a number above 1."""
    power = 1
    while power * 10 < tokens:
        power *= 10
    return power


def predictions(file: Path, tokens: int, tau: int) -> Report:
    """State the cost of counting the first ``tokens`` ids from samples of them."""
    samples = {"decade": decade_below(tokens), "dry_run": SAMPLE_TOKENS}
    return {
        law: fresh(
            "processes.mining_process",
            what="predict",
            ids=file,
            tokens=tokens,
            tau=tau,
            sample_tokens=sample,
        )
        for law, sample in samples.items()
        if sample < tokens
    }


def measure(file: Path, tokens: int, options: argparse.Namespace) -> Report:
    """Count the first ``tokens`` ids: memory in one new process, times in another."""
    common = {"ids": file, "tokens": tokens, "tau": options.tau}
    counted = fresh("processes.mining_process", what="count", **common)
    timed = fresh("processes.mining_process", what="pairs", rounds=options.rounds, **common)
    one, two = (timed["seconds"][f"threads_{n}"] for n in (1, THREADS))
    per_token = 1e9 / counted["tokens"]
    return {
        "tokens": counted["tokens"],
        "peak_bytes": counted["peak_bytes"],
        "rules": counted["rules"],
        "distinct": timed["distinct"],
        "seconds": spread(two)["median"],
        "nanoseconds_1": spread([per_token * second for second in one]),
        "nanoseconds_2": spread([per_token * second for second in two]),
        "threads": ratio(timed["seconds"], "threads_1", f"threads_{THREADS}"),
    }


def errors(prediction: Report, measured: Report) -> dict[str, float]:
    """Return how far each quantity was predicted too high, as a share of the measurement."""
    pairs = {
        "memory": (prediction["memory_bytes"], measured["peak_bytes"]),
        "seconds": (sum(prediction["seconds"].values()), measured["seconds"]),
        "distinct": (sum(prediction["distinct"].values()), sum(measured["distinct"].values())),
        "rules": (sum(prediction["frequent"].values()), sum(measured["rules"].values())),
    }
    return {name: predicted / max(found, 1e-9) - 1 for name, (predicted, found) in pairs.items()}


def scale(file: Path, sizes: list[int], report: Report, store: Save, options: Any) -> None:
    """Predict, store, then measure, one size after the other; last the decade beyond."""
    for size in sizes:
        stated = report["predictions"][str(size)] = predictions(file, size, options.tau)
        store()
        measured = report["measured"][str(size)] = measure(file, size, options)
        for prediction in stated.values():
            prediction["error"] = errors(prediction, measured)
        store()
    beyond = 10 * sizes[-1]
    law = fresh(
        "processes.mining_process",
        what="predict",
        ids=file,
        tokens=sizes[-1],
        tau=options.tau,
        sample_tokens=sizes[-1],
        total=beyond,
    )
    report["predictions"][str(beyond)] = {"decade": law}


def repeat(base: Ids, times: int, tau: int, report: Report, store: Save) -> None:
    """Mine a corpus repeated on segment borders, and the corpus itself.

    Args:
        base: Token ids [T]; the remainder of a segment is left out.
        times: How often it is repeated.
        tau: Threshold of the corpus itself; ``times`` that of the repeated one.
        report: Receives the results under "repeat".
        store: Writes the report; called when the prediction stands in it.
    """
    ids, _ = whole_segments(base)
    with tempfile.TemporaryDirectory(prefix="umim-repeat-") as name:
        folder = Path(name)
        np.save(folder / "base.npy", ids, allow_pickle=False)
        write_repeated(folder / "repeated.npy", ids, times)
        many = {"ids": folder / "repeated.npy", "tau": times * tau}
        prediction = fresh("processes.mining_process", what="predict", **many)
        report["repeat"] = found = {
            "times": times,
            "tau": times * tau,
            "base_tokens": len(ids),
            "predicted_bytes": prediction["memory_bytes"],
        }
        store()
        counted = fresh("processes.mining_process", what="count", save=folder / "many.npz", **many)
        fresh(
            "processes.mining_process",
            what="count",
            ids=folder / "base.npy",
            tau=tau,
            save=folder / "one.npz",
        )
        one, all_ = load_counts(folder / "one.npz"), load_counts(folder / "many.npz")
        found |= {
            "tokens": counted["tokens"],
            "seconds": counted["seconds"],
            "peak_bytes": counted["peak_bytes"],
            "rules": counted["rules"],
            "equal": same_counts(one, all_, times) and same_rules(one, all_),
        }


def write_repeated(path: Path, ids: Ids, times: int) -> None:
    """Write ids several times over into one array file."""
    repeated = open_memmap(path, mode="w+", dtype=np.int32, shape=(times * len(ids),))
    for number in range(times):
        repeated[number * len(ids) : (number + 1) * len(ids)] = ids
    repeated.flush()


def same_rules(one: NgramCounts, other: NgramCounts) -> bool:
    """Return whether the default filters leave the same rules of both."""
    rules, others = RuleSet.from_counts(one), RuleSet.from_counts(other)
    return all(np.array_equal(rules.ids_by_order[n], others.ids_by_order[n]) for n in ORDERS)


def gates(report: Report) -> dict[str, Gate]:
    """Return value, limit and verdict of every gate that applies."""
    found: dict[str, Gate] = {}
    for law in ("decade", "dry_run"):
        stated = [
            by_law[law]["error"]
            for by_law in report["predictions"].values()
            if law in by_law and "error" in by_law[law]
        ]
        for quantity in ("memory", "seconds"):
            if stated:
                worst = max(abs(error[quantity]) for error in stated)
                found[f"{quantity}_error_{law}"] = at_most(worst, MAX_ERROR)
    repeated = report["repeat"]
    if repeated is not None:
        share = repeated["peak_bytes"] / repeated["predicted_bytes"]
        found["repeat_memory_of_prediction"] = at_most(share, 1.0)
    return found


def run(options: argparse.Namespace, report: Report) -> None:
    """Predict and measure each size, then the repeated corpus."""
    if (options.repeat is None) != (options.base is None):
        raise SystemExit("--repeat and --base go together")
    file = ids_file(options)
    available = len(open_ids(file, options.tokens))
    sizes = [size for size in sorted(options.sizes) if size <= available]
    if not sizes:
        raise SystemExit(f"the ids must reach a size, at least {min(options.sizes):,}")
    report |= {"segment_length": LENGTH, "tau": options.tau}
    report |= {"predictions": {}, "measured": {}, "repeat": None}

    def store() -> None:
        save(report, options.out)

    fresh("processes.mining_process", what="count", ids=file, tokens=_WARM_TOKENS)  # compiles, once
    scale(file, sizes, report, store, options)
    if options.repeat is not None:
        base = open_ids(options.base, options.base_tokens)
        repeat(base, options.repeat, options.tau, report, store)


def equal(report: Report) -> bool:
    """Return whether the repeated corpus has the rules of the corpus itself."""
    return report["repeat"] is None or bool(report["repeat"]["equal"])


main = Benchmark(
    name="mining_scaling",
    doc=__doc__,
    libraries=("matplotlib", "numba", "numpy"),
    options=CORPUS_OPTIONS
    | {"tau": 5, "sizes": SIZES, "rounds": 10, "repeat": int, "base": Path, "base_tokens": int},
    measure=run,
    gates=gates,
    equal=equal,
).main


if __name__ == "__main__":
    sys.exit(main())
