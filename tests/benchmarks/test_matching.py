"""The matching benchmark: peers, synthetic rules, gates and a tiny run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import matching
from benchmarks.common import Report
from benchmarks.matching import AhoCorasick, SetLoop, Spans, compare, gates
from benchmarks.processes.mining_process import LENGTH
from support.benchmark_runs import run_benchmark
from support.unit_counts import units_of
from umim_core.rules.ruleset import RuleSet

NESTED = [(1, 2), (1, 2, 3), (2, 3), (2, 3, 1, 2), (3, 3, 3), (0, 0), (0, 0, 0, 0)]


def naive(segments: np.ndarray, rules: RuleSet) -> Spans:
    """Try every length at every position."""
    wanted = {tuple(map(int, row)) for found in rules.ids_by_order.values() for row in found}
    return [
        (number * len(row) + at, length)
        for number, row in enumerate(segments)
        for at, length in units_of(row.tolist(), wanted)
        if length > 1
    ]


@pytest.fixture(params=["nested", "infix-free", "none"])
def rules(request: pytest.FixtureRequest) -> RuleSet:
    spans = {"nested": NESTED, "infix-free": [(1, 2, 3), (0, 0), (3, 1)], "none": []}
    return RuleSet.from_spans(spans[request.param])


@pytest.mark.parametrize("peer", [SetLoop, AhoCorasick])
def test_a_peer_finds_what_a_plain_loop_finds(
    peer: type[SetLoop] | type[AhoCorasick], rules: RuleSet, rng: np.random.Generator
) -> None:
    segments = rng.integers(0, 4, (40, 16))
    assert peer(rules)(segments) == naive(segments, rules)


def test_a_comparison_tells_whether_all_spans_are_equal(rng: np.random.Generator) -> None:
    ids = rng.integers(0, 4, 4 * LENGTH).astype(np.int32)
    rules = RuleSet.from_spans(NESTED)
    found, equal = compare(rules, ids, lambda: None, rounds=2)
    assert equal
    assert found["merged_spans"] == len(naive(ids.reshape(-1, LENGTH), rules)) > 0
    assert {side["seconds"]["runs"] for side in found["sides"].values()} == {2}


def figures(
    share: float = 0.05, loop: float = 5.0, size: float = 50.0, load: float = 0.9
) -> Report:
    sizes = {"memory": size, "disk": size, "directory": 99.0}
    measured = {
        "tokenizing_share": {"median": share},
        "sides": {matching.LOOP: {"ratio": {"median": loop}}},
        "bytes_per_rule": sizes,
    }
    synthetic = {"bytes_per_rule": sizes, "load_seconds": {"median": load}}
    return {"rule_sets": {"tau 5, nested": measured}, "synthetic": synthetic}


@pytest.mark.parametrize(
    ("figure", "missed"),
    [
        ({}, []),
        ({"share": 0.051}, ["tau_5_nested_of_tokenizing"]),
        ({"loop": 4.9}, ["tau_5_nested_times_python_loop"]),
        ({"size": 50.1}, ["bytes_per_rule_memory", "bytes_per_rule_disk"]),
        ({"load": 1.1}, ["load_seconds"]),
    ],
)
def test_each_gate_has_its_limit(figure: dict[str, float], missed: list[str]) -> None:
    verdicts = gates(figures(**figure))
    assert [name for name, (_, _, passed) in verdicts.items() if not passed] == missed


@pytest.mark.full
def test_a_tiny_run_writes_results_and_page(rng: np.random.Generator, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", (300 + rng.zipf(1.3, 60 * LENGTH) % 500).astype(np.uint32))
    options = ["--held-out", 20 * LENGTH, "--rounds", 2, "--synthetic", 100, 100, 100]
    assert "pyahocorasick" in run_benchmark("matching", tmp_path, *options).page
