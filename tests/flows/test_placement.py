from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows import parts
from support.recorder import Recorder
from tasks.cluster.lease import ClusterLease
from tasks.run.pipeline import site_of
from umim_core.config.recipe import Recipe


def recipe(**cluster: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "small",
            "corpus": {"kind": "docstrings"},
            "cells": [
                {"backbone": "umim-docs-llama"},
                {"backbone": "umim-docs-llama", "source": "confidence", "min_probability": 0.9},
            ],
            "distill": {"max_steps": 1},
            "benchmark": {},
            "shipped": ["umim-docs-llama"],
            "cluster": cluster,
        }
    )


@pytest.mark.parametrize(
    ("use_gpu", "expected"), [(False, ("cpu", "float32")), (True, ("cuda", "bfloat16"))]
)
def test_every_stage_that_measures_does_so_as_distillation_runs(
    use_gpu: bool, expected: tuple[str, str], tmp_path: Path
) -> None:
    run: Any = Recorder(recipe(use_gpu=use_gpu))
    parts.run_everything(run)
    placed = {call.stage.name for call, _ in run.given if "dtype" in call.stage.of_run}
    assert placed == {"confidence", "evaluate", "task-score", "benchmark"}
    site = site_of(tmp_path, run.recipe, ClusterLease(run.recipe.cluster))
    assert (site.device, site.dtype) == expected
