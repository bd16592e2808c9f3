"""The benchmark of stock tasks: statistics, cells that are found again, a small run, its page."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")

from benchmarks.stock_tasks.__main__ import main
from benchmarks.stock_tasks.paired import (
    check_same_questions,
    mean_of,
    mean_of_means,
    summary,
)
from benchmarks.stock_tasks.task_sides import UNMERGED, Models, Side, base_of, settings
from docs.make.results import benchmark_page
from support.unit_counts import counted_tokens, read_spans
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.embedded.assets import embedded_path
from umim_core.errors import ArtifactError, BackboneMismatchError, ConfigError
from umim_core.rules.ruleset import RuleSet

SPLITS = """\
---
configs:
- config_name: default
  data_files:
  - split: train
    path: rows.jsonl
  - split: validation
    path: rows.jsonl
---
"""
ROWS = [
    {"goal": "Sum an array", "sol1": "Use numpy.", "sol2": "Use a lamp.", "label": 0},
    {"goal": "Read a file of text", "sol1": "Close it.", "sol2": "Open it.", "label": 1},
    {"goal": "Sort a list of numbers", "sol1": "Sort it.", "sol2": "Print.", "label": 0},
]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that stands for the hub and holds three rows of piqa."""
    folder = tmp_path_factory.mktemp("hub")
    (folder / "baber" / "piqa").mkdir(parents=True)
    (folder / "baber" / "piqa" / "README.md").write_text(SPLITS, "utf-8")
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    (folder / "baber" / "piqa" / "rows.jsonl").write_text(text, "utf-8")
    return folder


def test_a_difference_is_paired_by_question() -> None:
    # The differences are 1, -1, 0, 1: mean 0.25, deviation sqrt(11/12), error half of it.
    cell = {"acc": [1, 0, 1, 1], "log_likelihoods": [[0.0, 1.0]] * 4}
    base = {"acc": [0, 1, 1, 0], "log_likelihoods": [[0.0, 1.0]] * 2 + [[1.0, 0.0]] * 2}
    given = {"questions": 4, "of": 4, "split": "test", "seconds": 1.0}
    counts = {"inputs": {"raw": 10, "units": 8}, "contexts": {"raw": 0, "units": 0}}
    found = summary(given | counts | cell, base)
    assert found["acc_difference"] == pytest.approx({"mean": 0.25, "std": np.sqrt(11 / 12) / 2})
    assert found["acc"] == pytest.approx({"mean": 0.75, "std": 0.25})
    assert found["choices_changed"] == 0.5
    assert found["token_reduction"] == pytest.approx(0.2)
    assert found["context_token_reduction"] is None


def test_the_error_of_a_mean_over_tasks_adds_up_by_squares() -> None:
    found = mean_of_means([{"mean": 0.2, "std": 0.03}, {"mean": 0.4, "std": 0.04}])
    assert found == pytest.approx({"mean": 0.3, "std": 0.025})
    assert mean_of([0, 1, 1])["std"] == pytest.approx(np.sqrt(1 / 3 / 3))


def test_the_base_is_the_first_side_that_was_measured() -> None:
    assert base_of(UNMERGED) == "none"
    assert base_of(["no rules", "hf"]) == "hf"
    assert base_of(["no rules"]) == "no rules"


def test_settings_are_checkpoints_by_what_they_merge_with_raw_tails_of_contexts_alone() -> None:
    found = [side.label for side in settings(["a", "b"], ["prompt", "all"], [0, 16, 16])]
    of_each = ["prompt", "prompt, raw tail 16", "all"]
    assert found == [f"{name}, {way}" for name in "ab" for way in of_each]
    with pytest.raises(ConfigError, match="raw_tail must be an integer of at least 0"):
        next(settings(["a"], ["all"], [-1]))


def test_sides_with_other_questions_are_not_compared() -> None:
    check_same_questions("piqa", {"hf": {"documents": "a"}, "none": {"documents": "a"}})
    with pytest.raises(ArtifactError, match="must have answered the same questions"):
        check_same_questions("piqa", {"hf": {"documents": "a"}, "none": {"documents": "b"}})


def test_one_question_is_refused(hub: Path) -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        main(["--hub", str(hub), "--checkpoints", "umim-docs-llama", "--limit", "1"])


@pytest.mark.parametrize("name", ["backbone", "backbone.gguf"])
def test_a_relative_path_of_a_backbone_is_made_absolute(
    name: str, tmp_path: Path, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []

    def load(where: str, **_: object) -> None:
        found.append(where)
        raise InterruptedError

    (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("benchmarks.stock_tasks.task_sides.load_backbone", load)
    with pytest.raises(InterruptedError):
        main(["--hub", str(hub), "--checkpoints", "umim-docs-llama", "--backbone", name])
    assert found == [str(tmp_path / name)]


@pytest.mark.parametrize(
    "changed", ["", "module", "rules", "backbone", "dtype", "batch_size", "limit"]
)
def test_every_input_is_part_of_a_cells_key(
    changed: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    def models(checkpoint: Checkpoint, **other: Any) -> Models:
        given: dict[str, Any] = {
            "backbone_name": str(tiny_checkpoint.parent / "backbone"),
            "dtype": "float32",
            "batch_size": 4,
        }
        return Models({"tiny": checkpoint}, **given | other)

    checkpoint = Checkpoint.load(tiny_checkpoint)
    config, module, rules = checkpoint.config, checkpoint.module, checkpoint.rules
    other: dict[str, Any] = {}
    if changed == "module":
        next(module.parameters()).data.mul_(2)
    elif changed == "rules":
        rules = RuleSet.from_spans([(1, 2)], tokenizer_fingerprint=config.tokenizer_fingerprint)
    elif changed == "backbone":
        shutil.copytree(tiny_checkpoint.parent / "backbone", tmp_path / "backbone")
        weights = load_file(tmp_path / "backbone" / "model.safetensors")
        first = sorted(weights)[0]
        changed_weights = weights | {first: weights[first] * 2}
        save_file(changed_weights, tmp_path / "backbone" / "model.safetensors", {"format": "pt"})
        other["backbone_name"] = str(tmp_path / "backbone")
    elif changed in ("dtype", "batch_size"):
        other[changed] = {"dtype": "bfloat16", "batch_size": 8}[changed]
    altered = models(Checkpoint(config, module, rules), **other)
    limit = 3 if changed == "limit" else 2
    sides = [*map(Side, UNMERGED), *settings(["tiny"], ["prompt", "all"], [0, 2])]
    for side in sides:
        unmerged = side.way in UNMERGED and changed in ("module", "rules")
        key = models(Checkpoint.load(tiny_checkpoint)).key("piqa", side, "data", 2)
        same = key == altered.key("piqa", side, "data", limit)
        assert same == (not changed or unmerged)
    keys = [json.dumps(altered.key("piqa", side, "data", 2)) for side in sides]
    assert len(set(keys)) == len(sides) == 6


def test_a_run_is_resumed_from_its_cells_and_writes_its_page(hub: Path, tmp_path: Path) -> None:
    cells, out = tmp_path / "cells", tmp_path / "stock_tasks.json"
    given = ["--hub", hub, "--cells", cells, "--checkpoints", "docs=umim-docs-llama"]
    given += ["--tasks", "piqa", "--limit", 2, "--out", out]
    options = [*map(str, given), "--raw-tails", "0", "3"]
    assert main(options) in (0, 1)  # 1: slower on a busy machine, or points were lost
    report = json.loads(out.read_text("utf-8"))
    merged = {"docs, prompt": 0, "docs, prompt, raw tail 3": 3, "docs, all": 0}
    sides = report["tasks"]["piqa"]["sides"]
    assert list(sides) == [*UNMERGED, *merged]
    assert {side["questions"] for side in sides.values()} == {2}
    assert list(report["mean"]) == ["none", *merged]
    assert report["tasks"]["piqa"]["against_hf"]["none"]["difference"] == 0.0
    assert report["tasks"]["piqa"]["against_hf"]["no rules"]["difference"] < 1e-4
    place = embedded_path("umim-docs-llama", "checkpoint")
    assert place is not None
    spans, tokenizer = read_spans(place / "rules"), load_tokenizer("umim-docs-llama")
    pairs = [
        (f"Question: {row['goal']}\nAnswer:", f" {row[choice]}")
        for row in ROWS[:2]
        for choice in ("sol1", "sol2")
    ]
    for label, tail in merged.items():
        way = report["settings"][label]["merge"]
        counted = counted_tokens(pairs, way, tokenizer, spans, tail)
        found = sides[label]["inputs"]
        assert (found["raw"], found["units"]) == tuple(counted) and not found["over"]
    tailed, whole = (sides[f"docs, prompt{tail}"] for tail in (", raw tail 3", ""))
    assert tailed["contexts"]["raw"] == whole["contexts"]["raw"]  # a raw tail stays in the count
    assert tailed["context_token_reduction"] < whole["context_token_reduction"]
    page = benchmark_page(report)
    assert out.with_suffix(".md").read_text("utf-8") == page
    assert "2 of 3" in page and "docs, prompt, raw tail 3" in page and "lm-eval's own" in page

    written = {path: path.stat().st_mtime_ns for path in cells.iterdir()}
    main(options)
    again = json.loads(out.read_text("utf-8"))
    assert (report["cells"], again["cells"]) == (
        {"measured": 6, "kept": 0},
        {"measured": 0, "kept": 6},
    )
    page = out.with_suffix(".md").read_text("utf-8")
    assert "kept from earlier calls: 6" in page and "earlier calls" not in benchmark_page(report)
    assert "no_rules_times_hf" not in again["gates"]
    del report["gates"]["no_rules_times_hf"], report["cells"], again["cells"]
    for found in (report, again):
        for row in found["tasks"]["piqa"]["against_hf"].values():
            del row["same_call"]
    assert again == report
    main([*options, "--sides", "no rules", "--merge", "prompt"])
    assert {path: path.stat().st_mtime_ns for path in cells.iterdir()} == written
    fewer = json.loads(out.read_text("utf-8"))
    assert list(fewer["mean"]) == ["no rules", *list(merged)[:2]]
    assert fewer["tasks"]["piqa"]["against_hf"] == {}
    page = out.with_suffix(".md").read_text("utf-8")
    assert page == benchmark_page(fewer) and "lm-eval's own" not in page


def test_a_checkpoint_of_another_backbone_is_refused(hub: Path, tiny_checkpoint: Path) -> None:
    names = ["--checkpoints", "umim-docs-llama", f"tiny={tiny_checkpoint}"]
    with pytest.raises(BackboneMismatchError, match="belongs to"):
        main(["--hub", str(hub), *names])
