"""The matching benchmark: peers, synthetic rules, gates and a tiny run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from benchmarks import matching
from benchmarks.common import ROOT, Report
from benchmarks.matching import bytes_per_rule, compare, gates, held_out, load_times, rule_sets
from benchmarks.peers.matching_peers import AhoCorasick, SetLoop, Spans, merged_spans
from benchmarks.processes.mining_process import LENGTH
from umim_core.mining.counting import count_ngrams
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.text.token_ids import cut_segments

NESTED = [(1, 2), (1, 2, 3), (2, 3), (2, 3, 1, 2), (3, 3, 3), (0, 0), (0, 0, 0, 0)]
PER_ORDER = {2: 300, 3: 500, 4: 700}


def naive(segments: np.ndarray, rules: RuleSet) -> Spans:
    """Try every length at every position."""
    wanted = {tuple(map(int, row)) for found in rules.ids_by_order.values() for row in found}
    spans: Spans = []
    for number, row in enumerate(segments):
        at = 0
        while at < len(row):
            found = [tuple(map(int, row[at : at + n])) for n in (4, 3, 2)]
            length = max((len(span) for span in found if span in wanted), default=1)
            if length > 1:
                spans.append((number * len(row) + at, length))
            at += length
    return spans


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


def test_no_span_crosses_a_segment() -> None:
    rules = RuleSet.from_spans([(1, 2)])
    segments = np.array([[0, 1], [2, 1], [1, 2]])
    assert SetLoop(rules)(segments) == AhoCorasick(rules)(segments) == [(4, 2)]


def test_the_largest_id_is_a_character_too() -> None:
    rules = RuleSet.from_spans([(262143, 262142)])
    assert AhoCorasick(rules)(np.array([[262143, 262142]])) == [(0, 2)]


def test_our_units_are_read_as_spans(rules: RuleSet, rng: np.random.Generator) -> None:
    segments = rng.integers(0, 4, (40, 16))
    starts, lengths, _ = Matcher(rules).segment_many(segments.reshape(-1), np.arange(41) * 16)
    assert merged_spans(starts, lengths) == naive(segments, rules)


def test_a_comparison_tells_whether_all_spans_are_equal(rng: np.random.Generator) -> None:
    ids = rng.integers(0, 4, 4 * LENGTH).astype(np.int32)
    rules = RuleSet.from_spans(NESTED)
    found, equal = compare(rules, ids, lambda: None, rounds=2)
    assert equal
    assert found["merged_spans"] == len(naive(ids.reshape(-1, LENGTH), rules)) > 0
    assert {side["seconds"]["runs"] for side in found["sides"].values()} == {2}


def test_three_rule_sets_are_measured(rng: np.random.Generator) -> None:
    ids, offsets = cut_segments(rng.integers(0, 6, 20 * LENGTH), LENGTH)
    found = rule_sets(count_ngrams(ids, offsets, 5))
    assert [(rules.origin.tau, rules.origin.containment) for rules in found.values()] == [
        (5, "drop"),
        (50, "drop"),
        (5, "keep"),
    ]


def test_held_out_ids_are_those_of_the_held_out_text(
    tiny_tokenizer: PreTrainedTokenizerFast, rng: np.random.Generator
) -> None:
    ids = rng.integers(1, 32, 10_000)
    texts, encoded = held_out(ids, tiny_tokenizer)
    assert len(texts) == 3
    assert texts[0].startswith(f"w{ids[0]} w{ids[1]} ")
    assert np.array_equal(encoded, ids)


def test_synthetic_rules_have_the_orders_asked_for() -> None:
    rules = matching.synthetic_rules(PER_ORDER)
    assert rules.counts_by_order == PER_ORDER
    assert all(
        len(np.unique(rules.ids_by_order[n], axis=0)) == count for n, count in PER_ORDER.items()
    )


def test_bytes_per_rule_are_those_of_the_files(tmp_path: Path) -> None:
    rules = matching.synthetic_rules(PER_ORDER)
    rules.save(tmp_path / "rules")
    found = bytes_per_rule(rules, tmp_path / "rules")
    tables = (tmp_path / "rules" / "matcher" / "tables.npy").stat().st_size
    assert found["disk"] == tables / 1500
    assert found["memory"] == rules.tables.nbytes / 1500
    assert found["directory"] > found["disk"]


def test_loading_is_timed_after_a_first_load(tmp_path: Path) -> None:
    matching.synthetic_rules(PER_ORDER).save(tmp_path / "rules")
    seconds = load_times(tmp_path / "rules", np.zeros(LENGTH, np.int32), 3)
    assert len(seconds) == 3 and min(seconds) > 0


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
    out = tmp_path / "matching.json"
    command = [sys.executable, "benchmarks/matching.py", "--ids", tmp_path / "ids.npy"]
    command += ["--held-out", 20 * LENGTH, "--rounds", 2, "--synthetic", 100, 100, 100]
    command += ["--out", out]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=ROOT, timeout=600
    )
    report = json.loads(out.read_text("utf-8"))
    assert json.loads(done.stdout.splitlines()[-1]) == report
    assert report["equal"] is True
    assert str(tmp_path) not in out.read_text("utf-8")
    assert "pyahocorasick" in out.with_suffix(".md").read_text("utf-8")
