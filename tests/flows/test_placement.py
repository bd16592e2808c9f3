from __future__ import annotations

from typing import Any

import pytest

from flows import parts
from support.recorder import Recorder
from umim_core.config.recipe import Recipe

MEASURING = {"confidence_stage", "evaluate_stage", "task_score_stage", "benchmark_stage"}


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
    use_gpu: bool, expected: tuple[str, str]
) -> None:
    run: Any = Recorder(recipe(use_gpu=use_gpu))
    parts.run_everything(run)
    measured = [(f.__name__, args[-2:]) for f, args, _ in run.given if f.__name__ in MEASURING]
    assert {name for name, _ in measured} == MEASURING
    assert {placement for _, placement in measured} == {expected}
