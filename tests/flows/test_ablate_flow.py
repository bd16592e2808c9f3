from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from flows.pipeline_flows import ablate
from support.shared_services import PrefectServer
from support.tracked_runs import runs_of
from tasks.report.comparison import COMPARISON_PARAMS

RECIPE = {
    "name": "tiny-ablation",
    "seed": 3,
    "corpus": {
        "kind": "docstrings",
        "packages": ["numpy", "click"],
        "out_of_domain": ["mpmath"],
        "train_tokens": 60000,
    },
    "segment_length": 128,
    "cells": [
        {"backbone": "umim-docs-llama", "tau": 5},
        {"backbone": "umim-docs-llama", "tau": 2, "source": "confidence"}
        | {"confidence_tokens": 16000},
    ],
    "distill": {"max_steps": 2, "batch_size": 2, "validate_every": 2, "validation_rows": 2},
    "task": None,
    "evaluate": {"alignment_rows": 4, "perplexity_rows": 2, "batch_size": 4},
    "cluster": {"workers": 0},
}


@pytest.mark.full
def test_cells_are_compared_and_a_second_run_finds_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, using_prefect: PrefectServer
) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("UMIM_ROOT", str(tmp_path / "root"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    told = ablate(str(recipe))
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.glob("root/*/*/manifest.json")}
    assert ablate(str(recipe)) == told
    assert stamps == {p: p.stat().st_mtime_ns for p in tmp_path.glob("root/*/*/manifest.json")}
    files = {Path(line).name: Path(line) for line in told.splitlines() if line.startswith("/")}
    ends = ("-kl.svg", "-top1.svg", ".json", ".md")
    assert set(files) == {f"tiny-ablation{end}" for end in ends}
    data = json.loads(files["tiny-ablation.json"].read_text("utf-8"))
    assert [cell["row"]["rule_source"] for cell in data["cells"]] == ["frequency", "confidence"]
    assert [cell["training"]["steps"] for cell in data["cells"]] == [2, 2]
    for cell in data["cells"]:
        assert sum(cell["rules"].values()) == cell["row"]["metrics"]["rules"]
    assert [cell["confidence_tokens"] for cell in data["recipe"]["cells"]] == [None, 16000]
    rows = runs_of(uri, "comparison")
    assert len(rows) == 2
    assert all(set(COMPARISON_PARAMS) <= set(row.data.params) for row in rows)
