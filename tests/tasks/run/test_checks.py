"""A recipe for GPUs on a machine without one: refused before anything runs, where it needs one."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.run.checks import check_machine
from tasks.run.pipeline import open_pipeline
from umim_core.config.recipe import Recipe
from umim_core.errors import ConfigError

MESSAGE = r"^cluster\.use_gpu needs a CUDA device; got none\. Set it to false"
AWAY = {"address": "10.0.0.1:6379"}


def raw(**changes: Any) -> dict[str, Any]:
    cluster = {"use_gpu": True} | changes.pop("cluster", {})
    cell = {"backbone": "umim-docs-llama"} | changes.pop("cell", {})
    return {
        "name": "small",
        "corpus": {"kind": "docstrings"},
        "cells": [cell],
        "distill": {"max_steps": 1},
        "cluster": cluster,
    } | changes


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize(
    ("flow", "changes"),
    [
        ("umim", {}),
        ("umim-distill", {"cluster": {"workers": 0}}),
        ("umim-evaluate", {}),
        ("umim-mine", {"cell": {"source": "confidence", "min_probability": 0.9}}),
    ],
)
def test_a_flow_that_needs_a_gpu_here_is_refused(flow: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=MESSAGE):
        check_machine(Recipe.model_validate(raw(**changes)), flow)


@pytest.mark.parametrize(
    ("flow", "changes"),
    [
        ("umim", {"cluster": {"use_gpu": False}}),
        ("umim", {"cluster": AWAY}),
        ("umim-evaluate", {"cluster": AWAY}),
        (
            "umim-mine",
            {"cell": {"source": "confidence", "min_probability": 0.9}, "cluster": AWAY},
        ),
    ],
)
def test_a_flow_that_needs_none_here_may_run(flow: str, changes: dict[str, Any]) -> None:
    check_machine(Recipe.model_validate(raw(**changes)), flow)


@pytest.mark.parametrize(("gpus", "refused"), [(1, True), (2, False)])
def test_workers_need_a_gpu_each(gpus: int, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    recipe = Recipe.model_validate(raw(cluster={"workers": 2}))
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
    path.write_text(yaml.safe_dump(raw()), encoding="utf-8")
    with pytest.raises(ConfigError, match=MESSAGE), open_pipeline(str(path), "umim"):
        pass
    assert not (tmp_path / "root").exists()


def test_a_root_that_goes_with_a_ray_job_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked = tmp_path / "session_1/runtime_resources/working_dir_files/_ray_pkg_1"
    monkeypatch.setenv("UMIM_ROOT", str(unpacked / ".umim"))
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(raw(cluster={"use_gpu": False})), encoding="utf-8")
    with (
        pytest.raises(ConfigError, match="must outlive the Ray job"),
        open_pipeline(str(path), "umim"),
    ):
        pass
    assert not unpacked.exists()
