"""Recipes that ask for what is not there, GPUs say: refused before anything runs."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from support.small_recipe import least_recipe
from tasks.run.checks import check_machine, check_named, check_positions, check_root
from tasks.run.pipeline import open_pipeline
from tasks.run.recipes import find_recipe
from umim_core.config.recipe import Recipe
from umim_core.errors import ArtifactError, ConfigError, UmimError

MESSAGE = r"^cluster\.use_gpu needs a CUDA device; got none\. Set it to false"
AWAY = {"address": "10.0.0.1:6379"}


def of_gpus(cell: dict[str, Any] | None = None, **cluster: Any) -> Recipe:
    cells = [{"backbone": "umim-docs-llama"} | (cell or {})]
    return least_recipe(cells=cells, cluster={"use_gpu": True} | cluster)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


SURE = {"cell": {"source": "confidence", "min_probability": 0.9}}


@pytest.mark.parametrize(
    ("flow", "gpus", "changes", "message"),
    [
        ("umim", 0, {}, MESSAGE),
        ("umim-distill", 0, {"workers": 0}, MESSAGE),
        ("umim-mine", 0, SURE, MESSAGE),
        ("umim-distill", 1, {"workers": 2}, "workers 2 needs as many GPUs on this machine; got 1"),
        ("umim-distill", 2, {"workers": 2}, None),
        ("umim", 0, {"use_gpu": False}, None),
        ("umim", 0, AWAY, None),
        ("umim-mine", 0, {}, None),
        ("umim-mine", 0, SURE | AWAY, None),
    ],
)
def test_a_flow_that_needs_gpus_of_this_machine_is_refused_without_them(
    flow: str, gpus: int, changes: dict[str, Any], message: str | None, monkeypatch: Any
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        check_machine(of_gpus(**changes), flow)


TABLE = {"name": "t", "kind": "table", "table": "tab:ppl", "checkpoint": "umim-docs-llama"}
SCORES = {"tasks": ["umim_docstrings"], "settings": [{"name": "base", "merge": "none"}]}
PROTECTED = {"name": "merged", "merge": "prompt", "protect": ["("]}
TEXT = {"kind": "text", "paths": ["nowhere.txt"]}
CURVES = {"name": "c", "kind": "adaptation", "questions": {"kind": "docstrings"}, "taus": [5]}
CURVES |= {"sft": {"max_steps": 1}, "dpo": {"max_steps": 1}}
LEAST = least_recipe().model_dump(mode="json", exclude_unset=True)
GENERATED = {"kind": "generated", "questions": [TEXT], "model": "umim-docs-llama"}
GENERATED |= {"max_tokens": 2049}
SPLITS = ("train", "valid", "test")
FOLDER = {"kind": "dataset", "name": "./nowhere"}
RULES = {"backbone": "umim-docs-llama", "rules": "nowhere/rules"}
HEADLINE = {"checkpoint": "umim-docs-gpt2", "benchmark": {"prompt_lengths": [1000]}}


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (LEAST | {"cluster": {"use_gpu": True}}, MESSAGE),
        (LEAST | {"shipped": ["umim-docs-lama"]}, "Did you mean 'umim-docs-llama'"),
        (LEAST | {"cells": [*LEAST["cells"], RULES]}, "nowhere/rules"),
        (LEAST | {"corpus": {"kind": "files"} | dict.fromkeys(SPLITS, TEXT)}, "got nowhere.txt"),
        (LEAST | {"corpus": {"kind": "files"} | dict.fromkeys(SPLITS, FOLDER)}, "got './nowhere'"),
        (LEAST | {"corpus": GENERATED}, "a corpus file must exist; got nowhere.txt"),
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
        pytest.raises(ConfigError, match="must outlive the"),
        open_pipeline(str(path), "umim", Recipe),
    ):
        pass
    assert not unpacked.exists()


@pytest.mark.parametrize("root", ["file", "file/below", "/proc/umim"])
def test_a_root_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, root: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match="must be writable"):
        check_root(tmp_path / root)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"segment_length": 4000}, "segment_length must be at most 2048, the positions of umim-d"),
        ({"corpus": GENERATED}, r"corpus\.max_tokens must be at most 2048, .*; got 2049"),
        ({"cells": [{"backbone": "nested"}], "segment_length": 256}, "at most 128, .*; got 256"),
        ({"headline": HEADLINE}, "headline.benchmark.prompt_lengths with .* at most 1024, the pos"),
        ({"headline": HEADLINE, "segment_length": 1025}, "segment_length must be at most 1024, "),
    ],
)
def test_rows_longer_than_the_positions_are_refused(
    fields: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nested = {"model_type": "gemma3", "text_config": {"max_position_embeddings": 128}}
    (tmp_path / "nested").mkdir()
    (tmp_path / "nested" / "config.json").write_text(json.dumps(nested))
    with pytest.raises(ConfigError, match=message):
        check_positions(least_recipe(**fields))
