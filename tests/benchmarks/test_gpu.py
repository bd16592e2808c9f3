"""The GPU kit on the processor: all parts in seconds, what ends a setting, what a kill leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu import BENCHMARK, TINY, measure_part
from benchmarks.runner import Report
from docs.make.results import benchmark_page
from umim_core.throughput.roofline import Roofline


def test_a_tiny_run_measures_every_part_on_the_processor(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    assert BENCHMARK.main(["--tiny", "--out", str(out)]) == 0
    report = json.loads(out.read_text("utf-8"))
    assert report["failed"] == []
    for row in report["exactness"]:  # a forward of other units would be seen
        assert row["merges"] and row["error"] < row["tolerance"] < row["raw_error"] / 2
    assert {(row["dtype"], row["batch_size"]) for row in report["exactness"]} == {
        (dtype, rows) for dtype in ("float32", "bfloat16") for rows in (1, 4)
    }
    prefill = [(row["prompt_tokens"], row["asked_reduction"]) for row in report["prefill"]]
    assert prefill == [(n, asked) for n in TINY.prefill for asked in (*TINY.reductions, None)]
    assert all(row["matching"] > 0 < row["merging"] for row in report["prefill"][3::4])
    assert [row["batch_size"] for row in report["decode"]] == list(TINY.decode)
    page = out.with_suffix(".md").read_text("utf-8")
    started = {name: report[name] for name in report if name not in ("decode", "gates")}
    assert "## Prefill" in benchmark_page(started)  # of a run that was killed
    assert "Tiny shapes" in page


def test_a_setting_that_fails_fails_the_run_and_the_others_are_measured(tmp_path: Path) -> None:
    report: Report = {"failed": []}

    def measure(number: int) -> list[Report]:
        if number == 2:
            Roofline(1.0).check("prefill", 2.0, 1.0)
        if number == 4:
            raise KeyboardInterrupt
        return [{"number": number}]

    out = tmp_path / "gpu.json"
    with pytest.raises(KeyboardInterrupt):  # what was measured before a kill is on the disk
        measure_part(report, out, "decode", [(1,), (2,), (3,), (4,), (5,)], measure)
    written = json.loads(out.read_text("utf-8"))
    assert written["decode"] == [{"number": 1}, {"number": 3}]
    assert [one["setting"] for one in written["failed"]] == ["decode 2"]
    assert "must stay below the device's 1 FLOP/s" in written["failed"][0]["error"]
