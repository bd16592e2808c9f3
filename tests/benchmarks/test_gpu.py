"""The GPU kit on the processor: all parts in seconds, what ends a setting, what a kill leaves."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import BENCHMARK, TINY, UNTIL, Run, distillation
from benchmarks.runner import Report
from docs.make.results import benchmark_page
from umim_core.errors import EvaluationError
from umim_core.throughput.roofline import Roofline


def test_a_tiny_run_measures_every_part_on_the_processor(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    assert BENCHMARK.main(["--tiny", "--out", str(out)]) == 0
    report = json.loads(out.read_text("utf-8"))
    assert report["left_out"] == report["failed"] == []
    for row in report["exactness"]:  # a forward of other units would be seen
        assert row["merges"] and row["error"] < row["tolerance"] < row["raw_error"] / 2
    assert {(row["dtype"], row["batch_size"]) for row in report["exactness"]} == {
        (dtype, rows) for dtype in ("float32", "bfloat16") for rows in (1, 4)
    }
    prefill = [(row["prompt_tokens"], row["asked_reduction"]) for row in report["prefill"]]
    assert prefill == [(n, asked) for n in TINY.prefill for asked in (*TINY.reductions, None)]
    assert all(row["merging"] > 0 for row in report["prefill"][3::4])
    assert [row["batch_size"] for row in report["decode"]] == list(TINY.decode)
    fit = {(row["prompt_tokens"], row["side"]): row["fits"] for row in report["pool"]}
    per_unit = 2 * 2 * 16 * 2  # keys and values, layers, width of 2 heads, bfloat16
    assert fit[96, "raw"] == TINY.pool // (per_unit * (96 + TINY.new - 1)) == 3
    assert fit[96, "merged"] == 5
    waited = {row["requests"]: row["first_token"] for row in report["pool"] if row["side"] == "raw"}
    assert waited[1]["runs"] == 1 and waited[5]["runs"] == 5
    assert {row["what"] for row in report["distillation"]} == {"loss", "step"}
    page = out.with_suffix(".md").read_text("utf-8")
    started = {name: report[name] for name in report if name not in ("decode", "pool", "gates")}
    assert "## Prefill" in benchmark_page(started)  # of a run that was killed
    assert "Tiny shapes" in page and all(f"| {row['side']}" in page for row in report["pool"])


def test_a_setting_that_fails_fails_the_run_and_the_others_are_measured(tmp_path: Path) -> None:
    run = Run({"exactness": []}, tmp_path / "gpu.json")

    def measure(number: int) -> list[Report]:
        if number == 2:
            Roofline(1.0).check("prefill", 2.0, 1.0)
        if number == 4:
            raise KeyboardInterrupt
        return [{"number": number}]

    with pytest.raises(KeyboardInterrupt):  # what was measured before a kill is on the disk
        run.part("pool", [(1,), (2,), (3,), (4,), (5,)], measure)
    written = json.loads((tmp_path / "gpu.json").read_text("utf-8"))
    assert written["pool"] == [{"number": 1}, {"number": 3}]
    assert [one["setting"] for one in written["failed"]] == ["pool 2"]
    assert "must stay below the device's 1 FLOP/s" in written["failed"][0]["error"]


def test_what_a_part_has_no_time_for_is_named() -> None:
    run = Run({}, None)
    run.began = time.monotonic() - UNTIL["prefill"] - 1
    run.part("prefill", [(1024,)], lambda tokens: [{}])
    run.part("decode", [(1,)], lambda rows: [{}])
    assert run.report["left_out"] == ["prefill 1024"]
    assert (run.report["prefill"], run.report["decode"]) == ([], [{}])


@pytest.mark.parametrize("what", ["loss", "step"])
def test_a_distillation_above_the_ceiling_is_refused(what: str) -> None:
    with pytest.raises(EvaluationError, match="must stay below"):
        distillation(TINY, torch.device("cpu"), Roofline(1.0), what)
