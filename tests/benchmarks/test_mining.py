"""The mining benchmark: sides, gates and a tiny run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import mining
from benchmarks.common import Report
from benchmarks.mining import COUNTER, OURS, PREFIX, compare, gates, make_sides
from benchmarks.processes.mining_process import LENGTH
from support.benchmark_runs import run_benchmark
from umim_core.mining.counting import count_ngrams
from umim_core.text.token_ids import UniformOffsets

SEGMENTS = 80


@pytest.fixture
def ids(rng: np.random.Generator) -> np.ndarray:
    """Token ids in which some are far more frequent than others."""
    return (rng.zipf(1.3, SEGMENTS * LENGTH) % 1000).astype(np.uint32)


def found(**changes: object) -> Report:
    """Figures that meet every gate."""
    sides = {name: {"tokens_per_s": 9e6, "cores": 1} for name in (mining.OURS, mining.OURS_1)}
    medians = {
        mining.DUCKDB: 2.7,
        mining.DUCKDB_APRIORI: 2.6,
        COUNTER: 5.5,
        mining.OURS_1: 1.7,
    }
    return {
        "sides": sides,
        "ratios": {name: {"median": median} for name, median in medians.items()},
        "same": {COUNTER: True, PREFIX: True},
        "memory": {"peak_bytes": 90.0, "bound_bytes": 100.0},
        "ray": None,
        **changes,
    }


def verdicts(report: Report) -> dict[str, bool]:
    return {name: passed for name, (_, _, passed) in gates(report).items()}


def test_all_sides_find_the_same(ids: np.ndarray) -> None:
    sides = make_sides(ids, 5, counter_tokens=len(ids))
    assert PREFIX not in sides
    report = compare(sides, rounds=1)
    assert report["same"] == dict.fromkeys(sides, True)
    counts = count_ngrams(ids, UniformOffsets(LENGTH, SEGMENTS), 5)
    assert report["rules"] == {str(n): len(counts.keys[n]) for n in (2, 3, 4)}
    assert min(report["rules"].values()) > 0


def test_a_side_that_finds_less_is_seen(ids: np.ndarray) -> None:
    sides = make_sides(ids, 5, counter_tokens=len(ids))
    whole = sides[mining.POLARS]

    def short() -> dict:
        result = whole.run()
        keys, counts = result[4]
        return {**result, 4: (keys[1:], counts[1:])}

    few = {OURS: sides[OURS], mining.POLARS: replace(whole, run=short)}
    assert len(short()[4][0]) == len(whole.run()[4][0]) - 1
    assert compare(few, rounds=1)["same"] == {OURS: True, mining.POLARS: False}


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"same": {COUNTER: False}}, "equal_to_counter"),
        ({"same": {COUNTER: True, PREFIX: False}}, "equal_to_counter"),
        ({"memory": {"peak_bytes": 101.0, "bound_bytes": 100.0}}, "memory_of_bound"),
        ({"ray": {"tokens": 10**8, "share": {"median": 0.59}}}, "ray_of_kernel"),
    ],
)
def test_a_gate_is_missed(changes: Report, missed: str) -> None:
    assert [name for name, passed in verdicts(found(**changes)).items() if not passed] == [missed]


@pytest.mark.full
def test_a_tiny_run_writes_results_and_page(ids: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", ids)
    options = ["--rounds", 1, "--counter-tokens", 20_000, "--commit", "abc"]
    options += ["--ray", tmp_path / "ids.npy", "--ray-rounds", 1]
    run = run_benchmark("mining", tmp_path, *options)
    assert run.report["ray"]["equal"] is True
    assert run.status == (0 if all(gate[2] for gate in run.report["gates"].values()) else 1)
    assert run.report["memory"]["peak_bytes"] > 0
    assert "| DuckDB, packed ids" in run.page
