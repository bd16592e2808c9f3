"""Shared parts of the benchmarks: gates, alternating runs, fresh processes, facts and results."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np

ROOT: Final = Path(__file__).resolve().parents[1]
THREADS: Final = 2  # of every side that may use more than one
SLOW_SECONDS: Final = 10.0
SLOW_ROUNDS: Final = 3
_STATUS: Final = Path("/proc/self/status")

Gate = tuple[float, float, bool]
Report = dict[str, Any]


def at_least(value: float, limit: float) -> Gate:
    """Return value, limit and verdict of a gate that asks for more."""
    return round(value, 4), round(limit, 4), value >= limit


def at_most(value: float, limit: float) -> Gate:
    """Return value, limit and verdict of a gate that asks for less."""
    return round(value, 4), round(limit, 4), value <= limit


@dataclass(frozen=True)
class Spread:
    """A median and its quartiles.

    Attributes:
        median: Half of the values lie below.
        low: A quarter lies below.
        high: A quarter lies above.
        runs: Number of values.
    """

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise measurements; at least one."""
        low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
        return cls(float(median), float(low), float(high), len(values))

    def as_dict(self) -> dict[str, float]:
        """Return the numbers for JSON."""
        return asdict(self)


def ratio(seconds: Mapping[str, Sequence[float]], of: str, to: str) -> Spread:
    """Return how many times as long ``of`` took as ``to``, by pairs of the same round."""
    return Spread.of([a / b for a, b in zip(seconds[of], seconds[to], strict=False)])


def timed(run: Callable[[], object]) -> tuple[float, object]:
    """Return the seconds and the result of one run, with the garbage collector off for it."""
    gc.disable()
    try:
        began = time.perf_counter()
        result = run()
        return time.perf_counter() - began, result
    finally:
        gc.enable()


def alternate(
    sides: Mapping[str, Callable[[], object]],
    rounds: int,
    warmed: Callable[[str, Any], None] = lambda name, result: None,
) -> dict[str, list[float]]:
    """Run all sides in turn, forwards and backwards, so that drift hits all of them equally.

    The first run of each is a warm-up: it compiles, fills caches and is not counted. A side whose
    warm-up takes more than 10 s takes part in the first three rounds only.

    Args:
        sides: Display name -> what is measured.
        rounds: Rounds.
        warmed: Receives the result of each warm-up.

    Returns:
        Seconds of each side, one per round.
    """
    slow = set()
    for name, run in sides.items():
        seconds, result = timed(run)
        slow |= {name} if seconds > SLOW_SECONDS else set()
        warmed(name, result)
        del result
    measured: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    for number in range(rounds):
        for name in order:
            if number < SLOW_ROUNDS or name not in slow:
                measured[name].append(timed(sides[name])[0])
        order.reverse()
    return measured


def peak_bytes() -> float:
    """Return the largest resident memory of this process so far, in bytes.

    Linux only. ``getrusage`` will not do: a child begins with the peak of the process that started
    it.
    """
    (line,) = [x for x in _STATUS.read_text().splitlines() if x.startswith("VmHWM:")]
    return float(line.split()[1]) * 1024


def forget_peak() -> None:
    """Let :func:`peak_bytes` begin again at what this process holds now."""
    Path("/proc/self/clear_refs").write_text("5")


def fresh(module: str, **options: object) -> Any:
    """Run a module of this folder in a new process and return the JSON of its last line.

    Args:
        module: Name of the module.
        options: Its options; underscores become hyphens, None is left out.

    Raises:
        RuntimeError: If it fails.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}"]
    for name, value in options.items():
        if value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"benchmarks.{module} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def fix_threads() -> None:
    """Give every library the same threads; to be called before they are imported."""
    os.environ["POLARS_MAX_THREADS"] = str(THREADS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def facts(libraries: Sequence[str], commit: str | None) -> dict[str, object]:
    """Return where and with what was measured; no paths."""
    return {
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "commit": commit,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in libraries},
        },
    }


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every benchmark has."""
    parser.add_argument("--out", type=Path, help="write the results (JSON) and their page here")
    parser.add_argument("--commit", help="recorded")


def save(report: Report, out: Path | None) -> None:
    """Write the results."""
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def close(report: Report, out: Path | None) -> int:
    """Write the results, their page and figure, print page and one JSON line; return the status."""
    # Not in the processes that are measured: it draws.
    from docs.make.results import benchmark_page, documents_of

    save(report, out)
    for document in documents_of(out) if out is not None else ():
        document.write()
    text = json.dumps(report)
    print(benchmark_page(json.loads(text)))
    print(text)
    gates = report.get("gates", {}).values()
    return int(not report.get("equal", True) or not all(passed for _, _, passed in gates))
