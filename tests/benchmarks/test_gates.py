"""The frame of benchmarks, and gates: each has its limit, as committed results hold them."""

from __future__ import annotations

import argparse
import copy
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, mining
from benchmarks.runner import Benchmark, Gates, Report, alternate
from docs.make.document import RESULTS


def test_a_gate_is_met_at_its_limit_and_judged_before_rounding() -> None:
    gates = Gates()
    for name, value in {"met": 2.5, "missed": 2.4999, "by little": 2.499999}.items():
        gates.at_least(name, value, 2.5)
    missed = {"missed": (2.4999, 2.5, False), "by little": (2.5, 2.5, False)}
    assert gates == {"met": (2.5, 2.5, True), **missed}


def test_sides_alternate_after_a_warm_up() -> None:
    calls: list[str] = []
    sides = {name: lambda name=name: calls.append(name) for name in "ab"}
    seconds = alternate(sides, 4)
    assert calls == ["a", "b", *"abbaabba"]
    assert {name: len(values) for name, values in seconds.items()} == {"a": 4, "b": 4}


@pytest.mark.parametrize(
    ("passed", "same", "status"), [(True, True, 0), (False, True, 1), (True, False, 1)]
)
def test_the_status_tells_a_missed_gate_and_the_results_are_written(
    passed: bool, same: bool, status: int, tmp_path: Path
) -> None:
    def measure(options: argparse.Namespace, report: Report) -> None:
        report |= {"checkpoint": f"of {options.rows} rows", "backbone": "any", "dtype": "any"}
        report |= {"sets": {}, "equal": same}

    measure.__code__ = measure.__code__.replace(co_filename="problems.py")  # its page
    gates = {"speed": (1.0, 2.0, passed)}
    benchmark = Benchmark(measure, {"rows": 8}, lambda report: gates, libraries=("numpy",))
    out = tmp_path / "x.json"
    assert [benchmark.main(["--out", str(out), "--rows", n]) for n in "23"] == [status] * 2
    assert json.loads(out.read_text("utf-8"))["gates"] == {"speed": [1.0, 2.0, passed]}
    page = out.with_suffix(".md").read_text("utf-8")
    assert "merged prompts: of 3 rows" in page and "| speed |" in page


REFUSED = {
    "engine --backbones random-llama --device gpu": (1, "device must be cpu"),
    "engine --dtype float9": (2, "argument --dtype: invalid choice"),
    "engine --token-reductions 2": (1, "token_reductions.0 must be at most 0.75; got 2.0"),
    "matching --out /proc/none/x.json": (1, "/proc/none (0 bytes) must be writable"),
    "mining --ids odd.jsonl": (1, "odd.jsonl must be a flat .npy array of integers"),
    "mining --rounds 0": (2, "argument --rounds: must be at least 1, not 0"),
    "positions --data .": (1, "a corpus file must exist; got "),
    "positions --data none": (1, "--data must name a file or folder that exists; got none"),
    "problems --checkpoint ./none": (1, "a checkpoint that is named by its path must exist"),
    "problems --checkpoint umim-docs-llama --gsm8k odd.jsonl": (1, "must have question, answer"),
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_broken_rule_is_one_line_and_no_results(
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.jsonl").write_text('{"odd": 1}\n')
    name, *options = line.split()
    benchmark: Benchmark = importlib.import_module(f"benchmarks.{name}").BENCHMARK
    out = [] if "--out" in options else ["--out", "x.json"]
    with pytest.raises(SystemExit) as end:
        benchmark.main([*options, *out])
    said = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == REFUSED[line][0] and REFUSED[line][1] in said
    assert [path.name for path in tmp_path.iterdir()] == ["odd.jsonl"]


def of_mining() -> Report:
    ratios = {mining.DUCKDB: 2.6, mining.COUNTER: 5.5, mining.OURS_1: 1.7, mining.LONG: 1.6}
    return {
        "sides": {
            mining.OURS_1: {"tokens_per_s": 9e6, "cores": 1},
            mining.OURS: {"tokens_per_s": 18e6, "cores": 2},
        },
        "ratios": {name: {"median": median} for name, median in ratios.items()},
        "same": {mining.COUNTER: True},
        "memory": {"peak_bytes": 90.0, "bound_bytes": 100.0},
    }


def of_gpu() -> Report:
    ours = {"of_peak": 1 / 1.35, "bytes": 2e9, "gradient_error": 5e-2}
    rows = [("loss", "ours", 1 / 1.35), ("loss", "Liger", 1 / 1.8), ("step", "ours", 0.45)]
    sides = [ours | {"what": what, "side": side, "of_peak": of} for what, side, of in rows]
    exact = {"dtype": "float32", "merged": "inside, adapters", "batch_size": 4}
    exact |= {"error": 1e-5, "tolerance": 1e-5}
    whole = {"failed": [], "exactness": [exact], "distillation": sides}
    return whole | {"tiny": False, "seconds": gpu.LIMIT}


GATES: dict[str, tuple[Callable[[], Report], Callable[[Report], Report]]] = {
    "mining": (of_mining, mining.gates),
    "gpu": (of_gpu, gpu.gates),
}
# What is measured, where another figure stands, the figure, the gates that it misses.
WORSE: list[tuple[str, str, object, list[str]]] = [
    ("mining", f"same/{mining.COUNTER}", False, ["equal_to_counter"]),
    ("mining", f"ratios/{mining.DUCKDB}/median", 2.4, ["times_duckdb"]),
    ("mining", f"ratios/{mining.OURS_1}/median", 1.5, ["two_threads_times_one"]),
    ("mining", f"ratios/{mining.LONG}/median", 1.7, ["speed_to_16_of_4"]),
    ("mining", "memory/peak_bytes", 101.0, ["memory_of_bound"]),
    ("gpu", "failed", [{}], ["failed_settings_error"]),
    ("gpu", "exactness/0/error", 1.1e-5, ["float32_inside_adapters_4_rows_error"]),
    ("gpu", "seconds", gpu.LIMIT + 1, ["seconds"]),
    ("gpu", "distillation/0/of_peak", 0.735, ["loss_over_bound"]),
    ("gpu", "distillation/0/bytes", 3e9, ["loss_extra_bytes"]),
    ("gpu", "distillation/0/gradient_error", 6e-2, ["loss_gradient_error"]),
    ("gpu", "distillation/1/of_peak", 0.6, ["liger_over_ours"]),
    ("gpu", "distillation/2/of_peak", 0.44, ["step_of_peak"]),
]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["engine", "engine-smollm2-adapters", "engines", "engines-openvino", "matching"],
)
def test_a_committed_result_has_the_gates_that_its_figures_lead_to(name: str) -> None:
    report = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    benchmark = importlib.import_module(f"benchmarks.{report['benchmark']}").BENCHMARK
    assert json.loads(json.dumps(benchmark.gates(report))) == report["gates"]


@pytest.mark.parametrize("name", GATES)
def test_figures_at_the_limits_pass_every_gate(name: str) -> None:
    measured, gates = GATES[name]
    assert [gate for gate, (_, _, passed) in gates(measured()).items() if not passed] == []


@pytest.mark.parametrize(("name", "place", "figure", "missed"), WORSE)
def test_a_worse_figure_misses_its_gate_alone(
    name: str, place: str, figure: object, missed: list[str]
) -> None:
    measured, gates = GATES[name]
    report = copy.deepcopy(measured())
    *path, last = place.split("/")
    target: Any = report
    for part in path:
        target = target[part if isinstance(target, dict) else int(part)]
    target[last if isinstance(target, dict) else int(last)] = figure
    assert [gate for gate, (_, _, passed) in gates(report).items() if not passed] == missed


def test_two_threads_are_judged_where_they_are() -> None:
    report = of_mining()
    report["sides"][mining.OURS]["cores"] = 1
    del report["ratios"][mining.OURS_1]
    gone = {*mining.gates(of_mining())} - {*mining.gates(report)}
    assert gone == {"two_threads_times_one"}


@pytest.mark.parametrize("left_out", ["loss", "step"])
def test_a_distillation_that_is_left_out_misses_a_gate(left_out: str) -> None:
    report = of_gpu()
    report["distillation"] = [row for row in report["distillation"] if row["what"] != left_out]
    missed = [gate for gate, (_, _, passed) in gpu.gates(report).items() if not passed]
    assert missed == [f"{left_out}_measured"]
    assert f"{left_out}_measured" not in gpu.gates(report | {"tiny": True})
