"""A recipe whose corpus a model generates: its plan, its checks, and the mining flow."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from flows.parts import plan
from flows.pipeline_flows import mine
from support.shared_services import PrefectServer
from tasks.run.checks import check_positions
from umim_core import RuleSet
from umim_core.config.recipe import Recipe
from umim_core.errors import ConfigError

BACKBONE = "umim-docs-llama"


def raw_recipe(folder: Path, **corpus: object) -> dict[str, object]:
    path = folder / "questions.jsonl"
    path.write_text("".join(f'{{"text": "Return element {i} of the array."}}\n' for i in range(9)))
    return {
        "name": "generated",
        "corpus": {
            "kind": "generated",
            "questions": [{"kind": "jsonl", "paths": [str(path)]}],
            "model": BACKBONE,
            "trajectories": 2,
            "max_tokens": 48,
            "max_question_tokens": 20,
            "splits": {"train": 0.6, "valid": 0.2, "test": 0.2},
            "shard_questions": 5,
            **corpus,
        },
        "segment_length": 16,
        "cells": [{"backbone": BACKBONE, "tau": 2}],
        "distill": {"max_steps": 1},
        "task": None,
        "cluster": {"workers": 0},
    }


def test_the_corpus_is_generated_first(tmp_path: Path) -> None:
    steps = plan(Recipe.model_validate(raw_recipe(tmp_path)))
    assert steps[0] == {"stage": "generate", "of": BACKBONE}
    assert [step["stage"] for step in steps[1:4]] == ["corpus", "tokenize", "count"]


def test_trajectories_longer_than_the_positions_are_refused_before_anything_runs(
    tmp_path: Path,
) -> None:
    recipe = Recipe.model_validate(raw_recipe(tmp_path, max_tokens=2049))
    with pytest.raises(ConfigError, match=r"corpus\.max_tokens must be at most 2048, .*got 2049"):
        check_positions(recipe)


@pytest.fixture
def place(tmp_path: Path, using_prefect: PrefectServer) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("UMIM_ROOT", str(tmp_path / "root"))
        environment.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
        yield tmp_path


@pytest.mark.full
def test_rules_are_mined_from_generated_text(place: Path) -> None:
    (place / "recipe.yaml").write_text(json.dumps(raw_recipe(place)), encoding="utf-8")
    (rules,) = mine(str(place / "recipe.yaml"))
    assert RuleSet.load(rules).options.tau == 2
    built = Counter(path.parent.parent.name for path in place.glob("root/*/*/manifest.json"))
    assert built == {"generate": 1, "corpus": 1, "tokenize": 1, "count": 1, "filter": 1}
    client = MlflowClient(f"sqlite:///{place / 'mlflow.db'}")
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    read = {d.dataset.name for run in runs for d in run.inputs.dataset_inputs}
    assert {"questions", "generated", "corpus", "tokens"} <= read
    assert mine(str(place / "recipe.yaml")) == [rules]
    assert built == Counter(
        path.parent.parent.name for path in place.glob("root/*/*/manifest.json")
    )
