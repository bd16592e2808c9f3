"""Recipes that ask for what is not there, GPUs say: refused before anything runs."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from support.small_recipe import least_recipe
from tasks.run.checks import check_machine, check_named, check_positions
from tasks.run.pipeline import open_pipeline
from tasks.run.recipes import find_recipe
from umim_core.config.recipe import Recipe
from umim_core.errors import ConfigError, UmimError

MESSAGE = r"^cluster\.use_gpu needs a CUDA device; got none\. Set it to false"
AWAY = {"address": "10.0.0.1:6379"}


def of_gpus(cell: dict[str, Any] | None = None, **cluster: Any) -> Recipe:
    cells = [{"backbone": "umim-docs-llama"} | (cell or {})]
    return least_recipe(cells=cells, cluster={"use_gpu": True} | cluster)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize(
    ("flow", "changes"),
    [
        ("umim", {}),
        ("umim-distill", {"workers": 0}),
        ("umim-evaluate", {}),
        ("umim-mine", {"cell": {"source": "confidence", "min_probability": 0.9}}),
    ],
)
def test_a_flow_that_needs_a_gpu_here_is_refused(flow: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=MESSAGE):
        check_machine(of_gpus(**changes), flow)


@pytest.mark.parametrize(
    ("flow", "changes"),
    [
        ("umim", {"use_gpu": False}),
        ("umim", AWAY),
        ("umim-evaluate", AWAY),
        ("umim-mine", {"cell": {"source": "confidence", "min_probability": 0.9}} | AWAY),
    ],
)
def test_a_flow_that_needs_none_here_may_run(flow: str, changes: dict[str, Any]) -> None:
    check_machine(of_gpus(**changes), flow)


@pytest.mark.parametrize(("gpus", "refused"), [(1, True), (2, False)])
def test_workers_need_a_gpu_each(gpus: int, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    recipe = of_gpus(workers=2)
    with (
        pytest.raises(ConfigError, match=r"workers 2 needs as many GPUs on this machine; got 1")
        if refused
        else nullcontext()
    ):
        check_machine(recipe, "umim-distill")


def test_a_pipeline_is_refused_before_it_leaves_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMIM_ROOT", str(tmp_path / "root"))
    path = tmp_path / "small.yaml"
    path.write_text(of_gpus().model_dump_json(exclude_unset=True), encoding="utf-8")
    with pytest.raises(ConfigError, match=MESSAGE), open_pipeline(str(path), "umim"):
        pass
    assert not (tmp_path / "root").exists()


TABLE = {"name": "t", "kind": "table", "table": "tab:ppl", "checkpoint": "umim-docs-llama"}
SCORES = {"tasks": ["umim_docstrings"], "settings": [{"name": "base", "merge": "none"}]}
PROTECTED = {"name": "merged", "merge": "prompt", "protect": ["("]}
TEXT = {"kind": "text", "paths": ["nowhere.txt"]}
CURVES = {"name": "c", "kind": "adaptation", "questions": {"kind": "docstrings"}, "taus": [5]}
CURVES |= {"sft": {"max_steps": 1}, "dpo": {"max_steps": 1}}
LEAST = least_recipe().model_dump(mode="json", exclude_unset=True)
RULES = {"backbone": "umim-docs-llama", "rules": "nowhere/rules"}


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (LEAST | {"shipped": ["umim-docs-lama"]}, "Did you mean 'umim-docs-llama'"),
        (LEAST | {"cells": [*LEAST["cells"], RULES]}, "nowhere/rules"),
        (LEAST | {"mining": {"protect": ["("]}}, "a protected pattern must be a regular"),
        (TABLE | SCORES | {"checkpoint": "umim-docs-lama"}, "Did you mean 'umim-docs-llama'"),
        (TABLE | SCORES | {"backbone": "./nowhere"}, "nowhere"),
        (TABLE | {**SCORES, "settings": [PROTECTED]}, "a protected pattern must be a regular"),
        (TABLE | {"texts": {"t": {"source": TEXT}}}, "a corpus file must exist; got .*nowhere"),
        (CURVES | {"checkpoints": ["umim-docs-llama", "tiny/wt"]}, "got tiny/wt, which does not"),
    ],
)
def test_what_a_recipe_names_and_is_absent_is_refused_before_anything_runs(
    recipe: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMIM_ROOT", str(tmp_path / "root"))
    path = tmp_path / "own.yaml"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    kind = type(find_recipe(str(path)))
    with pytest.raises(UmimError, match=message), open_pipeline(str(path), "umim", kind):
        pass
    assert not (tmp_path / "root").exists()


def test_shipped_checkpoints_are_asked_for_by_the_flow_that_measures_them() -> None:
    recipe = Recipe.model_validate(LEAST | {"shipped": ["umim-docs-lama"]})
    check_named(recipe, "umim-mine")
    with pytest.raises(UmimError, match="Did you mean"):
        check_named(recipe, "umim")


def test_a_root_that_goes_with_a_ray_job_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked = tmp_path / "session_1/runtime_resources/working_dir_files/_ray_pkg_1"
    monkeypatch.setenv("UMIM_ROOT", str(unpacked / ".umim"))
    path = tmp_path / "small.yaml"
    path.write_text(of_gpus(use_gpu=False).model_dump_json(exclude_unset=True), encoding="utf-8")
    with (
        pytest.raises(ConfigError, match="must outlive the Ray job"),
        open_pipeline(str(path), "umim"),
    ):
        pass
    assert not unpacked.exists()


def test_positions_of_a_nested_configuration_are_those_of_its_text(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "text_config": {"max_position_embeddings": 128}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    recipe = least_recipe(cells=[{"backbone": str(tmp_path)}], segment_length=256)
    with pytest.raises(ConfigError, match=r"segment_length must be at most 128, .*; got 256"):
        check_positions(recipe)
