"""The scaling benchmark: sizes, errors, the repeated corpus, gates, figure and a tiny run."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common import ROOT, Report
from benchmarks.mining_scaling import (
    SIZES,
    decade_below,
    errors,
    gates,
    same_rules,
    scale,
    write_repeated,
)
from benchmarks.processes.mining_process import LENGTH, same_counts, whole_segments
from docs.make.results import benchmark_figure
from umim_core.mining.counting import count_ngrams

PREDICTION = {
    "memory_bytes": 120.0,
    "seconds": {"count_2": 1.0, "count_3": 1.0, "count_4": 0.5},
    "distinct": {"2": 10.0, "3": 20.0, "4": 30.0},
    "frequent": {"2": 1.0, "3": 2.0, "4": 3.0},
}
MEASURED = {
    "peak_bytes": 100.0,
    "seconds": 2.0,
    "distinct": {"2": 20, "3": 20, "4": 20},
    "rules": {"2": 4, "3": 4, "4": 4},
}


def test_the_sizes_are_half_decades() -> None:
    steps = np.diff(np.log10(SIZES))
    assert SIZES[0] == 10**6 and SIZES[-1] == 10**8
    assert np.allclose(steps, 0.5, atol=1e-6)


@pytest.mark.parametrize(
    ("tokens", "decade"), [(10**6, 10**5), (10**6 + 1, 10**6), (3_162_278, 10**6), (10**8, 10**7)]
)
def test_a_size_is_predicted_from_the_decade_below(tokens: int, decade: int) -> None:
    assert decade_below(tokens) == decade


def test_errors_are_shares_of_the_measurement() -> None:
    found = errors(PREDICTION, MEASURED)
    expected = {"memory": 0.2, "seconds": 0.25, "distinct": 0.0, "rules": -0.5}
    assert found == pytest.approx(expected)


def stated(memory: float, seconds: float) -> Report:
    return {"error": {"memory": memory, "seconds": seconds}}


def test_the_worst_error_of_any_size_is_judged_whatever_its_sign() -> None:
    predictions = {
        "10": {"decade": stated(0.1, -0.3)},
        "100": {"decade": stated(-0.2, 0.1), "dry_run": stated(0.0, 0.24)},
        "1000": {"decade": {}},  # beyond what was measured
    }
    found = gates({"predictions": predictions, "repeat": None})
    assert found == {
        "memory_error_decade": (0.2, 0.25, True),
        "seconds_error_decade": (0.3, 0.25, False),
        "memory_error_dry_run": (0.0, 0.25, True),
        "seconds_error_dry_run": (0.24, 0.25, True),
    }


@pytest.mark.parametrize(("peak", "passed"), [(100.0, True), (100.1, False)])
def test_the_repeated_corpus_must_stay_within_its_prediction(peak: float, passed: bool) -> None:
    repeat = {"peak_bytes": peak, "predicted_bytes": 100.0}
    found = gates({"predictions": {}, "repeat": repeat})
    assert found["repeat_memory_of_prediction"][2] is passed


def test_a_repeated_corpus_has_the_rules_of_its_base(
    rng: np.random.Generator, tmp_path: Path
) -> None:
    base, offsets = whole_segments((rng.zipf(1.3, 20 * LENGTH + 7) % 300).astype(np.uint32))
    write_repeated(tmp_path / "repeated.npy", base, 3)
    repeated, more = whole_segments(np.load(tmp_path / "repeated.npy", mmap_mode="r"))
    one, other = count_ngrams(base, offsets, 5), count_ngrams(repeated, more, 15)
    assert len(repeated) == 3 * 20 * LENGTH
    assert len(one.keys[4]) > 0
    assert same_counts(one, other, times=3) and same_rules(one, other)


def test_other_rules_are_seen(rng: np.random.Generator) -> None:
    base, offsets = whole_segments((rng.zipf(1.3, 20 * LENGTH) % 300).astype(np.uint32))
    one, other = count_ngrams(base, offsets, 5), count_ngrams(base, offsets, 6)
    assert not same_counts(one, other) and not same_rules(one, other)


def test_the_figure_shows_measurements_and_predictions() -> None:
    spread = {"median": 100.0}
    size = {"nanoseconds_1": spread, "nanoseconds_2": spread, "peak_bytes": 2.0**30}
    prediction = {"seconds": {"count_2": 1.0}, "memory_bytes": 2.0**31}
    measured = {"1000000": size, "10000000": size}
    predictions = {name: {"decade": prediction} for name in (*measured, "100000000")}
    svg = benchmark_figure(
        {"benchmark": "mining_scaling", "measured": measured, "predictions": predictions}
    )
    assert svg.startswith("<svg ")
    for text in ("measured, 1 thread", "measured, 2 threads", "predicted", "100,000,000", "Tokens"):
        assert text in svg


@pytest.mark.full
def test_a_tiny_run_states_predictions_and_writes_results(
    rng: np.random.Generator, tmp_path: Path
) -> None:
    np.save(tmp_path / "ids.npy", (rng.zipf(1.3, 400 * LENGTH) % 1000).astype(np.uint32))
    out = tmp_path / "mining_scaling.json"
    command = [sys.executable, "benchmarks/mining_scaling.py", "--ids", tmp_path / "ids.npy"]
    command += ["--sizes", 110_000, 200_000, 10**9, "--rounds", 2, "--out", out]
    command += ["--repeat", 2, "--base", tmp_path / "ids.npy", "--base-tokens", 50_000]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=ROOT, timeout=600
    )
    report = json.loads(out.read_text("utf-8"))
    assert json.loads(done.stdout.splitlines()[-1]) == report
    assert list(report["measured"]) == ["110000", "200000"]
    assert set(report["predictions"]) == {"110000", "200000", "2000000"}
    assert report["repeat"]["equal"] is True
    assert report["repeat"]["tokens"] == 2 * (50_000 // LENGTH) * LENGTH
    assert str(tmp_path) not in out.read_text("utf-8")
    assert (tmp_path / "mining-scaling.svg").read_text("utf-8").startswith("<svg ")
    assert "mining-scaling.svg" in out.with_suffix(".md").read_text("utf-8")


@pytest.mark.full
def test_a_prediction_is_stored_before_its_measurement(
    rng: np.random.Generator, tmp_path: Path
) -> None:
    np.save(tmp_path / "ids.npy", (rng.zipf(1.3, 200 * LENGTH) % 1000).astype(np.uint32))
    report: Report = {"predictions": {}, "measured": {}}
    stored: list[Report] = []
    options = argparse.Namespace(tau=5, rounds=1)
    scale(
        tmp_path / "ids.npy",
        [100_001],
        report,
        lambda: stored.append(json.loads(json.dumps(report))),
        options,
    )
    before, after = stored
    assert before["measured"] == {} and "error" not in before["predictions"]["100001"]["decade"]
    assert after["measured"].keys() == {"100001"}
    assert "error" in after["predictions"]["100001"]["decade"]
