"""Gates, alternation, fresh processes and results of the benchmarks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.common import Benchmark, Report, at_least
from benchmarks.timing import alternate


def test_a_gate_that_asks_for_more_is_met_at_its_limit() -> None:
    assert at_least(2.5, 2.5) == (2.5, 2.5, True)
    assert at_least(2.4999, 2.5) == (2.4999, 2.5, False)


def test_the_verdict_is_that_of_the_value_before_rounding() -> None:
    assert at_least(2.499999, 2.5) == (2.5, 2.5, False)


def test_sides_alternate_after_a_warm_up() -> None:
    calls: list[str] = []
    sides = {name: lambda name=name: calls.append(name) for name in "ab"}
    seconds = alternate(sides, 4)
    assert calls == ["a", "b", *"abbaabba"]
    assert {name: len(values) for name, values in seconds.items()} == {"a": 4, "b": 4}


def run(passed: bool, equal: bool, *arguments: object) -> int:
    """Run a benchmark whose one gate and comparison end as they are given."""

    def measure(options: argparse.Namespace, report: Report) -> None:
        report |= {"device": "cpu", "rows": options.rows, "length": 2, "backbones": {}}
        report["equal"] = equal

    benchmark = Benchmark(
        name="perplexity",
        doc="A benchmark.",
        options={"rows": 8},
        measure=measure,
        gates=lambda report: {"speed": (1.0, 2.0, passed)},
        libraries=("numpy",),
    )
    return benchmark.main(list(map(str, arguments)))


@pytest.mark.parametrize(
    ("passed", "equal", "status"), [(True, True, 0), (False, True, 1), (True, False, 1)]
)
def test_the_status_tells_a_missed_gate_and_the_results_are_written(
    passed: bool, equal: bool, status: int, tmp_path: Path
) -> None:
    out = tmp_path / "x.json"
    assert run(passed, equal, "--out", out, "--rows", 3) == status
    assert json.loads(out.read_text("utf-8"))["gates"] == {"speed": [1.0, 2.0, passed]}
    page = out.with_suffix(".md").read_text("utf-8")
    assert "3 rows of 2 tokens" in page and "| speed |" in page
