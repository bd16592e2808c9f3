"""The benchmark of raw second halves: cells, matched reductions, resumption, page and figure."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common import Report
from benchmarks.second_half.__main__ import main
from benchmarks.second_half.half_cells import ratio_to, wanted_cells
from docs.make.benchmark_charts import DRAWINGS
from docs.make.results import benchmark_page
from umim_core import UMIM
from umim_core.errors import ConfigError
from umim_core.evaluation.perplexity import compare_second_halves
from umim_core.evaluation.scoring import Scorer

WINDOW = 24
METHODS = ["truncation", "full-cache", "mean-embedding", "span-eviction-0", "llmlingua2"]


def ids_file(path: Path, seed: int) -> Path:
    """Random ids with the spans of the tiny checkpoint among them."""
    rng = np.random.default_rng(seed)
    spans = [[1, 2], [3, 4, 5], [6, 7, 8, 9], [10], [11], [12], [13]]
    ids = np.concatenate([spans[i] for i in rng.integers(0, len(spans), 1000)])
    np.save(path, ids.astype(np.int32))
    return path


@pytest.fixture
def words(tiny_checkpoint: Path, tmp_path: Path) -> list[str]:
    """Options of a run in a second."""
    texts = {name: ids_file(tmp_path / f"{name}.npy", n) for n, name in enumerate("tcd")}
    found = ["--test", texts["t"], "--cut", texts["c"], "--damage", texts["d"]]
    found += ["--window", WINDOW, "--length", 12, "--test-rows", 5, "--cut-rows", 40]
    found += ["--damage-rows", 8, "--cache", tmp_path / "cache", "--out", tmp_path / "half.json"]
    found += ["--checkpoints", f"tiny={tiny_checkpoint}", "--commit", "abc", "--raw-tails", 0, 3]
    return [*map(str, found), "--methods", *METHODS]


def test_umim_comes_first_and_has_all_raw_tails() -> None:
    cells = list(wanted_cells(["a", "b"], ["m"], [0.1], [0, 16]))
    assert [tuple(cell.values()) for cell in cells] == [
        ("umim", "a", 0.1, 0),
        ("umim", "a", 0.1, 16),
        ("umim", "b", 0.1, 0),
        ("umim", "b", 0.1, 16),
        ("m", "a", 0.1, 0),
    ]


def test_a_ratio_is_of_sums_and_its_error_paired_by_window() -> None:
    """Steps of 1 and 3 nats over 4 targets: e, and 0.5 = |1 - 3| / 4 of its logarithm."""
    base: Report = {"row_sums": [5.0, 6.0], "row_targets": [2, 2]}
    found = ratio_to(base, {"row_sums": [6.0, 9.0], "row_targets": [2, 2]})
    assert found == {"mean": pytest.approx(np.e), "std": pytest.approx(0.5 * np.e)}


def test_a_tiny_run_is_matched_goes_on_and_writes_page_and_figure(
    words: list[str], tmp_path: Path
) -> None:
    assert main([*words, "--target-tr", "0.25", "0.7"]) == 0
    out = tmp_path / "half.json"
    report = json.loads(out.read_text("utf-8"))
    points = {(p["method"], p["target"], p["tail"]): p for p in report["points"]}
    check_points(points)
    assert report["base"]["kv_bytes"] == points["full-cache", 0.25, 0]["kv_bytes"]
    page = out.with_suffix(".md").read_text("utf-8")
    assert page == benchmark_page(report)
    rows = [
        [cell.strip() for cell in row.split("|")[2:4]] for row in page.splitlines() if "25%" in row
    ]
    assert ["span-eviction-0", "KV"] in rows and ["truncation", "prefill and KV"] in rows
    assert "mean-embedding (the rules reach 0.3583 with all 3 that may stay) at 70%" in page
    assert "at 70%: not compared, UMIM has no figure." in " ".join(page.split())
    labels = [
        text.get_text() for text in DRAWINGS["second_half"][0].draw(report).legends[0].get_texts()
    ]
    assert labels[:3] == ["UMIM", "UMIM, 3 raw", "full-cache"]
    assert out.with_suffix(".svg").is_file()
    report["points"][0]["ppl"] = 1.0  # a point that is measured again would lose it
    out.write_text(json.dumps(report), "utf-8")
    assert main([*words, "--target-tr", "0.1", "0.25"]) == 0
    again = json.loads(out.read_text("utf-8"))["points"]
    assert again[: len(points)] == report["points"]
    assert {point["target"] for point in again[len(points) :]} == {0.1}


def test_points_that_were_measured_before_umim_are_compared_with_it(
    words: list[str], tmp_path: Path
) -> None:
    words = [*words[: words.index("--raw-tails")], "--methods", "truncation"]
    words += ["--commit", "abc"] * ("--commit" not in words) + ["--target-tr", "0.25"]
    for tails, compared in ((["3"], [False, False]), (["0", "3"], [True, True, False])):
        assert main([*words, "--raw-tails", *tails]) == 0
        points = json.loads((tmp_path / "half.json").read_text("utf-8"))["points"]
        assert ["umim_ratio" in point for point in points] == compared
    ratios = [point["ppl_ratio"]["mean"] for point in points]
    for point, ratio in zip(points[:2], ratios[:2], strict=True):
        assert point["umim_ratio"]["mean"] == pytest.approx(ratio / ratios[2])


def check_points(points: dict[tuple[str, float, int], Report]) -> None:
    """What each kind of method shows at a target that rules reach and at one beyond."""
    umim, tailed = points["umim", 0.25, 0], points["umim", 0.25, 3]
    for target, reduction in ((0.25, umim["token_reduction"]), (0.7, 8 / 12)):
        found = points["truncation", target, 0]
        assert found["token_reduction"] == found["cache_reduction"] == pytest.approx(reduction)
        assert (found["side"], found["shortfall"]) == ("prompt", 0.0)
    full = points["full-cache", 0.25, 0]
    assert (full["token_reduction"], full["cache_reduction"]) == (0.0, 0.0)
    assert full["shortfall"] == pytest.approx(umim["token_reduction"])
    assert full["ppl_ratio"]["mean"] == pytest.approx(1.0, abs=1e-5)
    assert umim["token_reduction"] > tailed["token_reduction"] > 0.0
    assert umim["prefill_flops"] < full["prefill_flops"] and umim["compress_flops"] > 0
    ratios = [points[name, 0.25, 0]["ppl_ratio"]["mean"] for name in ("truncation", "umim")]
    of_truncation = points["truncation", 0.25, 0]["umim_ratio"]["mean"]
    assert of_truncation == pytest.approx(ratios[0] / ratios[1]) and "umim_ratio" not in umim
    embedded, evicted = (points[name, 0.25, 0] for name in ("mean-embedding", "span-eviction-0"))
    assert embedded["token_reduction"] == umim["token_reduction"]
    assert (evicted["side"], evicted["token_reduction"]) == ("cache", 0.0)
    assert evicted["cache_reduction"] > 0.0 and evicted["compress_seconds"] is None
    for name in ("umim", "mean-embedding", "span-eviction-0"):
        assert "unreached" in points[name, 0.7, 0]
    assert "not_run" in points["llmlingua2", 0.25, 0]


def test_an_unknown_method_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="baseline must be one of"):
        main(["--methods", "truncatoin", "--checkpoints", "no-such-checkpoint"])


def test_a_target_that_no_rules_can_meet_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"above 0 and below 0\.75"):
        main(["--target-tr", "0.1", "0.8", "--checkpoints", "no-such-checkpoint"])


def test_a_damage_table_of_no_checkpoint_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(SystemExit, match="--damage-table must name a checkpoint"):
        main(["--checkpoints", "tiny=no-such-checkpoint", "--damage-table", "tyni=folder"])


def test_ways_of_shortening_are_compared_in_one_call(tiny_umim: UMIM) -> None:
    rows = [np.array([1, 2, 10, 3, 4, 5, 11, 12, 1, 2, 13, 10]), np.arange(1, 13)]
    own = tiny_umim.compressed
    scorers = {"base": Scorer(own.base(), "prompt", 12), "umim": Scorer(own, "prompt", 12)}
    found = compare_second_halves(rows, scorers, 2)
    assert (found["base"].nats, found["base"].cache_reduction) == (0.0, 0.0)
    read = {name: half.read for name, half in found.items()}
    assert found["umim"].nats == pytest.approx(np.log(read["umim"].ppl / read["base"].ppl))
    assert found["umim"].cache_reduction == read["umim"].token_reduction > 0.0
