"""Where the stages of a recipe for GPUs measure, and in which data type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flows import parts
from flows.planning import Planner
from tasks.stage import Artifact
from umim_core.config import Recipe

MEASURING = {"confidence_stage", "evaluate_stage", "task_score_stage", "benchmark_stage"}


class Recorder(Planner):
    """A plan that keeps what every stage is given."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.given: list[tuple[str, tuple[object, ...]]] = []

    def stage(self, function: Callable[..., Artifact], *args: object, label: str = "") -> Artifact:
        self.given.append((function.__name__, args))
        return super().stage(function, *args, label=label)


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
    sources = parts.prepare(run)
    results = parts.mine(run, sources)
    parts.distill(run, results)
    parts.evaluate(run, sources, results)
    parts.benchmark(run, results)
    parts.measure_shipped(run, sources)
    measured = [(name, args[-2:]) for name, args in run.given if name in MEASURING]
    assert {name for name, _ in measured} == MEASURING
    assert {placement for _, placement in measured} == {expected}
