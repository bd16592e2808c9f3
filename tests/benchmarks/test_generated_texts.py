"""The paper's tables of generated texts: figures over seeds, and a tiny run with its page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.generated_texts import BENCHMARK, MERGES, GenerationQuality, over_seeds
from docs.make.results import benchmark_page

QUALITY = GenerationQuality({"dist_1": float("nan"), "ppl": 8.0}, {})


def test_mean_and_deviation_are_over_seeds_and_null_where_undefined() -> None:
    several = over_seeds([GenerationQuality({"ppl": ppl}, {}) for ppl in (8.0, 10.0, 12.0)])
    assert several["ppl"] == {"mean": 10.0, "std": 2.0}
    alone = over_seeds([QUALITY])
    assert alone["ppl"] == {"mean": 8.0, "std": None}
    assert alone["dist_1"] == {"mean": None, "std": None}


def test_a_tiny_run_writes_results_and_their_page(tiny_checkpoint: Path, tmp_path: Path) -> None:
    words = [f"w{number}" for number in range(1, 32)]
    lines = [" ".join(words[start : start + 8] * 13) for start in range(4)]
    (tmp_path / "text.txt").write_text("\n".join(lines), "utf-8")
    out = tmp_path / "texts.json"
    options = ["--checkpoints", f"tiny={tiny_checkpoint}", "--text", tmp_path / "text.txt"]
    options += ["--prompt-tokens", 6, "--new-tokens", 5, "--prompts", 3, "--seeds", 2]
    assert BENCHMARK.main([str(option) for option in [*options, "--out", out]]) == 0
    report = json.loads(out.read_text("utf-8"))
    rows = report["subjects"]["tiny"]["rows"]
    assert [row["merge"] for row in rows] == [*MERGES] * 3
    assert [row["runs"] for row in rows] == [1] * 3 + [2] * 6
    assert [row["metrics"]["token_reduction"]["mean"] > 0 for row in rows] == [
        False,
        True,
        True,
    ] * 3
    assert rows[0]["metrics"]["mauve_stand_in_features"]["mean"] is None  # of three prompts
    for number, row in enumerate(rows):
        base = rows[number // 3 * 3]["by_prompt"]
        for name, values in row["by_prompt"].items():
            assert np.mean(values) == pytest.approx(row["metrics"][name]["mean"], abs=1e-9)
            if number % 3:
                step = np.subtract(values, base[name])
                wanted = {"mean": np.mean(step), "std": np.std(step, ddof=1) / 3**0.5}
                assert row["differences"][name] == pytest.approx(wanted, abs=1e-9)
        assert len(row["by_prompt"]) == 6 and ("differences" in row) == bool(number % 3)
    page = out.with_suffix(".md").read_text("utf-8")
    assert page == benchmark_page(report)
    assert "stand-in features: hidden states of" in page and page.count("UMIM, prompt and de") == 9
