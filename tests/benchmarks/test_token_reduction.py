"""The benchmark of quality by token reduction: rows, choice of rules, points, page and figure."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common import Report
from benchmarks.token_reduction.__main__ import main
from benchmarks.token_reduction.curve_points import new_points
from benchmarks.token_reduction.row_texts import spread_rows
from benchmarks.token_reduction.rule_policies import choose_rules
from docs.make.results import benchmark_page
from umim_core import UMIM
from umim_core.evaluation.rule_damage import measure_damage
from umim_core.rules.inspection import token_reduction
from umim_core.rules.matcher import Matcher

LENGTH = 12


def ids_file(path: Path, seed: int) -> Path:
    """Random ids with the spans of the tiny checkpoint among them, 60 rows."""
    rng = np.random.default_rng(seed)
    spans = [[1, 2], [3, 4, 5], [6, 7, 8, 9], [10], [11], [12], [13]]
    ids = np.concatenate([spans[i] for i in rng.integers(0, len(spans), 60 * LENGTH)])
    np.save(path, ids[: 60 * LENGTH].astype(np.int32))
    return path


@pytest.fixture
def words(tiny_checkpoint: Path, tmp_path: Path) -> list[str]:
    """Options of a run in seconds."""
    same, other = (ids_file(tmp_path / f"{seed}.npy", seed) for seed in range(2))
    texts = ["--test", f"mine={same}", "--cut", str(same), "--damage", str(other)]
    numbers = ["--length", LENGTH, "--test-rows", 6, "--cut-rows", 50, "--damage-rows", 8]
    places = ["--cache", tmp_path / "cache", "--out", tmp_path / "curve.json"]
    subject = ["--checkpoints", f"tiny={tiny_checkpoint}", "--commit", "abc"]
    return [*texts, *map(str, [*numbers, *places, *subject])]


def test_rows_are_evenly_spaced_over_the_segments_of_all_files() -> None:
    parts = [np.arange(11), np.arange(100, 113)]  # segments 0 4 | 100 104 108
    assert [row.tolist() for row in spread_rows(parts, 3, 4)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [104, 105, 106, 107],
    ]
    with pytest.raises(SystemExit, match="only 5 rows of 4 tokens, 6 are wanted"):
        spread_rows(parts, 6, 4)


def test_rows_of_another_text_are_left_out() -> None:
    parts = [np.arange(16)]
    first = spread_rows(parts, 2, 4)
    assert [row[0] for row in first] == [0, 8]
    assert [row[0] for row in spread_rows(parts, 2, 4, first)] == [4, 12]
    with pytest.raises(SystemExit, match="only 2 rows of 4 tokens, 3 are wanted"):
        spread_rows(parts, 3, 4, first)


@pytest.mark.parametrize(
    ("policy", "target", "sizes"),
    [
        ("count", 0.08, [2]),
        ("count", 0.24, [2, 3]),
        ("saved", 0.08, [3]),
        ("saved", 0.24, [2, 3]),
        ("damage", 0.08, [4]),
        ("damage", 0.26, [2, 4]),
    ],
)
def test_a_policy_keeps_the_first_rules_of_its_order(
    policy: str, target: float, sizes: list[int], tiny_umim: UMIM
) -> None:
    """Each span once a segment: three rules save 1, 2 and 3 of 12 tokens.

    Counts 10, 9, 2; saved tokens 10, 18, 6; nats per saved token 0.5, 1.5, 0.1.
    """
    row = np.array([1, 2, 10, 3, 4, 5, 11, 6, 7, 8, 9, 12])
    text = row, np.array([0, 12])
    support = {n: np.array([count]) for n, count in ((2, 10), (3, 9), (4, 2))}
    rules = replace(tiny_umim.rules, support_by_order=support)
    made = tiny_umim.checkpoint.with_contents(tiny_umim.module, rules)
    met = np.full(3, 100_000)  # so often that nothing is estimated
    measured = measure_damage([row], tiny_umim.compressed)
    table = replace(measured, occurrences=met, merges=met, kl=met * np.array([0.5, 3.0, 0.3]))
    cut = choose_rules(policy, target, UMIM(tiny_umim.backbone, made), text, [], table)
    assert cut.token_reduction == token_reduction(*text, Matcher(cut.rules)) >= target
    assert [n for n, count in cut.rules.counts_by_order.items() if count] == sizes


def test_protected_tokens_leave_every_policy(tiny_umim: UMIM) -> None:
    text = np.array([1, 2, 10, 3, 4, 5]), np.array([0, 6])
    cut = choose_rules("all", None, tiny_umim, text, ["w3"], None)
    assert cut.rules.counts_by_order == {2: 1, 3: 0, 4: 1}
    assert cut.token_reduction == 1 / 6


def test_points_of_another_damage_table_are_measured_anew() -> None:
    done = [{"policy": "damage", "target": 0.1, "table": "old"}]
    done += [{"policy": "count", "target": 0.1, "table": None}]
    wanted = [(p["policy"], p["target"]) for p in new_points(done, ["damage", "count"], [0.1], "x")]
    assert wanted == [("damage", 0.1)]


def test_a_tiny_run_goes_on_and_writes_page_and_figure(words: list[str], tmp_path: Path) -> None:
    words += ["--reductions", "0.1", "0.2", "0.7", "--ages", "0", "1", "--raw-tails", "0", "6"]
    assert main(words) == 0
    out = tmp_path / "curve.json"
    report = json.loads(out.read_text("utf-8"))
    points = report["subjects"]["tiny"]["points"]
    check_second_halves(report["subjects"]["tiny"])
    assert [(p["policy"], p["target"]) for p in points] == [
        *((policy, x) for policy in ("damage", "count", "saved") for x in (0.1, 0.2, 0.7)),
        ("all", None),
        ("eviction", None),
        ("eviction", None),
    ]
    merged, *evicted = points[-3:]
    assert [point["age"] for point in evicted] == [0, 1]
    for point in evicted:
        assert point["rules"] == merged["rules"]
        assert point["token_reduction"] <= merged["token_reduction"]
        assert point["kl"]["mean"] != merged["kl"]["mean"]
    reached = [point for point in points if "unreached" not in point]
    assert {point["target"] for point in points if point not in reached} == {0.7}
    for point in reached:
        assert point["cut_token_reduction"] >= (point["target"] or 0)
        assert point["kl"]["mean"] > 0 and point["ppl_ratio"]["mean"] > 0
        assert 0 < point["token_reduction"] < 0.7
    page = out.with_suffix(".md").read_text("utf-8")
    assert page == benchmark_page(report)
    assert "![Top-1, KL and perplexity ratio against token reduction](curve.svg)" in page
    assert "tiny, highest count, 70%: " in page
    assert "6 rows of 12 tokens of *mine*" in page and "50 rows of *0.npy*" in page
    assert "| span eviction, age 1 " in page and "), other rows than quality" in page
    for figure in ("curve.svg", "curve-prompt.svg"):
        assert (tmp_path / figure).read_text("utf-8").startswith("<svg")
    assert "![Perplexity behind shortened prompts](curve-prompt.svg)" in page
    assert len(list((tmp_path / "cache" / "token_reduction").iterdir())) == 1
    # A second call measures what is missing and nothing else, with the table that was kept.
    points[0]["kl"]["mean"] = -1.0
    halves = report["subjects"]["tiny"]["second_halves"]
    halves[0]["ppl"] = -1.0
    interrupted = copy.deepcopy(report)
    del interrupted["subjects"]["tiny"]["points"][-1]
    del interrupted["subjects"]["tiny"]["second_halves"][1:]
    out.write_text(json.dumps(interrupted), "utf-8")
    assert main(words) == 0
    again = json.loads(out.read_text("utf-8"))
    for found in (report, again):
        del found["subjects"]["tiny"]["points"][-1]["seconds"]
        for half in found["subjects"]["tiny"]["second_halves"][1:]:
            del half["seconds"]
    assert again == report


def check_second_halves(found: Report) -> None:
    """Of rows of 12 tokens: a raw tail of 6 leaves the whole first half raw."""
    halves = found["second_halves"]
    assert [(p["policy"], p["target"], p["raw_tail"], p.get("age")) for p in halves] == [
        *(
            (x, t, w, None)
            for x in ("damage", "count", "saved")
            for t in (0.1, 0.2, 0.7)
            for w in (0, 6)
        ),
        ("all", None, 0, None),
        ("all", None, 6, None),
        ("eviction", None, 0, 0),
        ("eviction", None, 0, 1),
    ]
    assert {p["target"] for p in halves if "unreached" in p} == {0.7}
    merged, raw, *evicted = halves[-4:]
    assert raw["token_reduction"] == 0 and raw["ppl_ratio"]["mean"] == pytest.approx(1, abs=1e-6)
    assert raw["ppl"] == pytest.approx(found["ppl_base_of_halves"], rel=1e-6)
    assert merged["token_reduction"] >= evicted[0]["token_reduction"] > 0
    assert abs(merged["ppl_ratio"]["mean"] - 1) > 1e-6 and merged["ppl_ratio"]["std"] > 0


def test_a_damage_table_of_no_checkpoint_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"\(tiny\), got tinny\. Did you mean 'tiny'"):
        main([*words, "--damage-table", "tinny=somewhere"])
