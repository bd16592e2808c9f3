"""The benchmark of generated texts: prompts, spread over seeds, and a tiny run with its page."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.generated_texts import MERGES, Subject, choose_prompts, main, over_seeds
from docs.make.results import benchmark_page
from umim_core import UMIM
from umim_core.errors import MissingExtraError, RuleSetError
from umim_core.evaluation.generation_quality import GenerationQuality

QUALITY = GenerationQuality(
    repetition={2: 0.5, 3: 0.5, 4: 0.5},
    distinct={1: float("nan"), 2: 0.5, 3: 0.5, 4: 0.5},
    ppl=8.0,
    tokens=100.0,
    token_reduction=0.25,
    gen_kv_reduction=0.5,
    cumulative_kv_reduction=0.125,
)


def test_mean_and_deviation_are_over_seeds_and_null_where_undefined() -> None:
    several = over_seeds([QUALITY, replace(QUALITY, ppl=10.0), replace(QUALITY, ppl=12.0)])
    assert several["ppl"] == {"mean": 10.0, "std": 2.0}
    alone = over_seeds([QUALITY])
    assert alone["ppl"] == {"mean": 8.0, "std": None}
    assert alone["dist_1"] == {"mean": None, "std": None}


def test_prompts_are_spread_over_documents_that_are_long_enough(tiny_umim: UMIM) -> None:
    texts = [" ".join([f"w{number}"] * length) for number, length in enumerate([0, 3, 2, 4, 9, 3])]
    chosen = choose_prompts(texts, tiny_umim, 3, length=3)  # of documents 1, 3, 4 and 5
    assert [prompt.tolist() for prompt in chosen] == [[1] * 3, [3] * 3, [5] * 3]
    with pytest.raises(SystemExit, match="only 1 documents have 3 tokens, 2 are wanted"):
        choose_prompts(["w1 w2", "w1 w2 w3"], tiny_umim, 2, length=3)


def test_every_way_of_merging_runs_in_batches(tiny_umim: UMIM) -> None:
    prompts = [np.array([1, 2, 9, 3, 4]), np.array([5, 6, 7, 8, 9, 1, 2])] * 2
    subject = Subject(tiny_umim, prompts, 6, 3)
    units = {
        merge: [row.prompt_units for row in subject.generate("greedy", merge, 0)]
        for merge in MERGES
    }
    assert units == {"none": [5, 7, 5, 7], "prompt": [4, 3, 4, 3], "all": [4, 3, 4, 3]}


def test_seeds_change_samples_and_not_greedy_texts(tiny_umim: UMIM) -> None:
    subject = Subject(tiny_umim, [np.array([1, 2, 9, 3])] * 2, 12, 2)

    def texts(decoding: str, seed: int) -> list[tuple[int, ...]]:
        return [row.ids for row in subject.generate(decoding, "all", seed)]

    assert texts("greedy", 0) == texts("greedy", 1)
    assert texts("plain sampling", 0) == texts("plain sampling", 0) != texts("plain sampling", 1)


def test_a_bound_on_damage_is_refused_where_rules_have_no_prices(tiny_checkpoint: Path) -> None:
    with pytest.raises(RuleSetError, match="3 rules without prices"):
        main(["--checkpoints", str(tiny_checkpoint), "--text", "absent.txt", "--max-damage", "1"])


def test_a_library_that_is_missing_is_named_before_anything_is_generated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.chrf", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'umim\[eval\]'"):
        main(["--checkpoints", "absent", "--text", "absent.txt"])


def test_a_tiny_run_writes_results_and_their_page(tiny_checkpoint: Path, tmp_path: Path) -> None:
    words = [f"w{number}" for number in range(1, 32)]
    lines = [" ".join(words[start : start + 8] * 13) for start in range(4)]
    (tmp_path / "text.txt").write_text("\n".join(lines), "utf-8")
    out = tmp_path / "texts.json"
    options = ["--checkpoints", f"tiny={tiny_checkpoint}", "--text", tmp_path / "text.txt"]
    options += ["--prompt-tokens", 6, "--new-tokens", 5, "--prompts", 3, "--seeds", 2]
    assert main([str(option) for option in [*options, "--out", out]]) == 0
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
