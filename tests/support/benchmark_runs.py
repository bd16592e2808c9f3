"""A tiny run of a benchmark, in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import Report
from support.processes import run_command


class BenchmarkRun(NamedTuple):
    """Exit status, results and page of a run."""

    status: int
    report: Report
    page: str


def run_benchmark(name: str, folder: Path, *options: object) -> BenchmarkRun:
    """Run a benchmark on ``ids.npy`` of a folder: all it compares is equal, and it is written."""
    out = folder / f"{name}.json"
    command = [sys.executable, f"benchmarks/{name}.py", "--ids", folder / "ids.npy"]
    done = run_command(*command, *options, "--out", out, seconds=900)
    assert out.exists(), done.stderr
    report = json.loads(out.read_text("utf-8"))
    assert json.loads(done.stdout.splitlines()[-1]) == report
    assert report["equal"] is True
    assert str(folder) not in out.read_text("utf-8")
    return BenchmarkRun(done.returncode, report, out.with_suffix(".md").read_text("utf-8"))
