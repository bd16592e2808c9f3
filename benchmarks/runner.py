"""The frame of every benchmark: options, facts, times, gates, result file and exit status."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from umim_core.cli.console_output import telling
from umim_core.errors import ConfigError, require
from umim_core.store.disk import check_writable, write_bytes

if TYPE_CHECKING:
    import torch

THREADS: Final = min(2, len(os.sched_getaffinity(0)))  # of every side that may use more than one
SLOW_SECONDS: Final = 10.0
SLOW_ROUNDS: Final = 3
_WRITTEN: Final = ("answers", "out")  # paths that need not be there
_FROM_0: Final = ("after", "few", "synthetic", "warmup")  # other numbers are from 1 on
T = TypeVar("T")
Report = dict[str, Any]


class Gates(dict[str, tuple[float, float, bool]]):
    """Value, limit and verdict of every gate."""

    def at_least(self, name: str, value: float, limit: float) -> None:
        self[name] = round(float(value), 4), round(limit, 4), value >= limit

    def at_most(self, name: str, value: float, limit: float) -> None:
        self[name] = round(float(value), 4), round(limit, 4), value <= limit


@dataclass(frozen=True)
class Benchmark:
    """A benchmark as a command; results, and their page, go by the name of its module.

    ``measure`` fills the report, and may :func:`save` it on the way; ``options`` are those of
    :func:`parse`, on top of ``--out`` and ``--commit``. The report's ``equal`` says whether all
    sides gave the same results; of ``libraries`` the versions are recorded.
    """

    measure: Callable[[argparse.Namespace, Report], None]
    options: Mapping[str, object]
    gates: Callable[[Report], Gates] | None = None
    libraries: Sequence[str] = ("numpy", "torch", "transformers")

    def main(self, arguments: list[str] | None = None) -> int:
        """Run it; write results, page and figure, print page and one JSON line.

        Returns 1 if a gate is missed or a result differs.
        """
        name = Path(self.measure.__code__.co_filename).stem
        doc = self.measure.__globals__["__doc__"]
        options = parse(doc, {**self.options, "out": Path, "commit": str}, arguments)
        fix_threads()
        report: Report = {"benchmark": name, "facts": facts(self.libraries, options.commit)}
        with telling(f"benchmarks.{name}"):
            _check_paths(options)
            self.measure(options, report)
        if self.gates is not None:
            report["gates"] = self.gates(report)
        # Not in the processes that are measured: it draws.
        from docs.make.results import benchmark_page, documents_of

        save(report, options.out)
        for document in documents_of(options.out) if options.out is not None else ():
            document.write()
        text = json.dumps(report)
        print(benchmark_page(json.loads(text)))
        print(text)
        passed = [gate[2] for gate in report.get("gates", {}).values()]
        return int(not (report.get("equal", True) and all(passed)))


def parse(
    doc: str, options: Mapping[str, object], arguments: list[str] | None = None
) -> argparse.Namespace:
    """Read a command line; an option is its type, its default, a list, or argparse's."""
    formatter = argparse.RawDescriptionHelpFormatter
    pages = "How it is measured and judged stands on its page: docs/make/templates."
    parser = argparse.ArgumentParser(description=doc, epilog=pages, formatter_class=formatter)
    for name, value in options.items():
        settings: dict[str, Any] = {"type": type(value), "default": value}
        if isinstance(value, type):
            settings = {"type": value}
        elif isinstance(value, list):
            settings = {"nargs": "+", "type": type(value[0]), "default": value}
        elif isinstance(value, dict):
            settings = value
        if settings.get("type") is int:
            settings = settings | {"type": _count(int(name not in _FROM_0))}
        shown = "by default %(default)s" if "default" in settings else None
        parser.add_argument(f"--{name.replace('_', '-')}", help=shown, **settings)
    return parser.parse_args(arguments)


def _count(least: int) -> Callable[[str], int]:
    def number(word: str) -> int:
        if int(word) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {word}")
        return int(word)

    return number


def _check_paths(options: argparse.Namespace) -> None:
    """Refuse files that are absent, and results that nothing could write, before anything runs."""
    for name, path in vars(options).items():
        if isinstance(path, Path) and name not in _WRITTEN:
            rule = f"--{name.replace('_', '-')} must name a file or folder that exists"
            require(path.exists(), ConfigError, rule, str(path), "Check the path.")
    if options.out is not None:
        check_writable(options.out.parent)


def fresh(run: Callable[..., T], *arguments: object) -> T:
    """Return what a function gives in a process of its own, which has run nothing else."""
    with ProcessPoolExecutor(1, get_context("spawn"), fix_threads) as pool:
        return pool.submit(run, *arguments).result()


def fix_threads() -> None:
    """Give every library the same threads; some read them when they are imported."""
    os.environ["POLARS_MAX_THREADS"] = str(THREADS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(THREADS)


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


def save(report: Report, out: Path | None) -> None:
    """Write the results; who is killed meanwhile leaves those before."""
    if out is not None:
        write_bytes(out, (json.dumps(report, indent=2) + "\n").encode())


def tell(*measured: object) -> None:
    """Say what was measured so far."""
    print(*measured, file=sys.stderr, flush=True)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, quartiles (``low``, ``high``) and number of measurements; at least one."""
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return {"median": float(median), "low": float(low), "high": float(high), "runs": len(values)}


def rate(seconds: Sequence[float], tokens: int) -> Report:
    """Return seconds, and so many tokens of each run a second."""
    taken = spread(seconds)
    return {"seconds": taken, "tokens_per_s": tokens / taken["median"]}


def ratio(seconds: Mapping[str, Sequence[float]], of: str, to: str) -> dict[str, float]:
    """Return how many times as long ``of`` took as ``to``, by pairs of the same round."""
    return spread([a / b for a, b in zip(seconds[of], seconds[to], strict=False)])


def timed(run: Callable[[], object]) -> tuple[float, object]:
    """Return the seconds and the result of one run, with the garbage collector off for it.

    A GPU that is in use has nothing to do when it begins and when it ends.
    """
    torch = sys.modules.get("torch")
    wait = torch.cuda.synchronize if torch and torch.cuda.is_initialized() else lambda: None
    gc.disable()
    try:
        wait()
        began = time.perf_counter()
        result = run()
        wait()
        return time.perf_counter() - began, result
    finally:
        gc.enable()


def alternate(
    sides: Mapping[str, Callable[[], object]],
    rounds: int,
    warmed: Callable[[str, Any], None] = lambda name, result: None,
) -> dict[str, list[float]]:
    """Run all sides in turn, forwards and backwards, so that drift hits every one of them.

    The first run of each is a warm-up: it compiles, fills caches and is not counted. A side whose
    warm-up takes more than 10 s takes part in the first three rounds only. Returns seconds a round.
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


def device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def memory_of(run: Callable[[], T]) -> tuple[float, T]:
    """Return by how many bytes the resident memory of this process grows in a run, and its result.

    Linux only. ``getrusage`` will not do: a child begins with the peak of the process that started
    it.
    """

    def peak() -> float:
        (line,) = re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
        return float(line) * 1024

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again at what is held now
    before = peak()
    result = run()
    return peak() - before, result
