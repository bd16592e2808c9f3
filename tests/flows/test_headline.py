"""Shipped checkpoints in a recipe: the headline with amounts of its own, adapted ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows import parts
from support.recorder import Recorder
from tasks.report.compare import ShippedResult, comparison_rows
from tasks.run import checks
from tasks.run.stage import Artifact, StageSpec, run_stage
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.recipe import Recipe
from umim_core.errors import ConfigError


def recipe(checkpoint: str, prompt: int = 512, segment: int = 512) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "small",
            "corpus": {"kind": "docstrings"},
            "cells": [{"backbone": "umim-docs-llama"}],
            "distill": {"max_steps": 1},
            "benchmark": {},
            "shipped": ["umim-docs-llama"],
            "segment_length": segment,
            "headline": {
                "checkpoint": checkpoint,
                "beside": [f"{checkpoint}-adapted"],
                "evaluate": {"alignment_rows": 3, "task_questions": 5},
                "benchmark": {"prompt_lengths": [prompt], "pairs": 2},
            },
        }
    )


def test_it_is_measured_on_its_own_amounts_and_leads() -> None:
    asked = recipe("umim-docs-gpt2")
    run: Any = Recorder(asked)
    _, shipped = parts.run_everything(run)
    assert [(result.name, result.leads) for result in shipped] == [
        ("umim-docs-gpt2", True),
        ("umim-docs-gpt2-adapted", True),
        ("umim-docs-llama", False),
    ]
    assert asked.headline is not None
    given = [
        (call.stage.name, call.arguments.get("config") or call.arguments["limit"])
        for call, label in run.given
        if label.startswith("umim-docs-gpt2 (shipped)")
    ]
    evaluate, benchmark = asked.headline.evaluate, asked.headline.benchmark
    scores = [("task-score", evaluate.task_questions)] * 2
    assert given == [("evaluate", evaluate), *scores, ("benchmark", benchmark)]


@pytest.mark.parametrize("check", [checks.check_positions, parts.plan])
@pytest.mark.parametrize(
    ("prompt", "segment", "field"),
    [(1000, 512, "headline.benchmark.prompt_lengths with new_tokens"), (8, 1025, "segment_length")],
)
def test_rows_longer_than_its_positions_are_refused_before_anything_runs(
    check: Callable[[Recipe], object], prompt: int, segment: int, field: str
) -> None:
    rule = f"{field} must be at most 1024, the positions of umim-docs-gpt2"
    with pytest.raises(ConfigError, match=rule):
        check(recipe("umim-docs-gpt2", prompt, segment))


def test_without_its_backbone_the_run_goes_on_and_says_so_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run: Any = Recorder(recipe("umim-no-such-checkpoint"))
    _, shipped = parts.run_everything(run)
    assert [result.name for result in shipped] == ["umim-docs-llama"]
    (line,) = caplog.messages
    assert line.startswith("the row of umim-no-such-checkpoint is left out: ")
    assert "\n" not in line


def adapted(folder: Path, setting: str) -> str:
    """A shipped checkpoint that notes that it was adapted; its directory."""
    made = Checkpoint.load("umim-docs-llama")
    training = {**made.config.training, "setting": setting}
    config = made.config.model_copy(update={"training": training})
    replace(made, config=config).save(folder / "adapted")
    return str(folder / "adapted")


def test_its_row_is_the_first_of_the_comparison(tmp_path: Path) -> None:
    def measured(number: float) -> Artifact:
        spec = StageSpec("evaluate", 1, {"number": number}, {})
        return run_stage(tmp_path, spec, lambda _: {"top1": number})

    found = [
        ShippedResult("umim-docs-llama", measured(0.1), measured(0.1)),
        ShippedResult("umim-docs-gpt2", measured(0.2), measured(0.2), leads=True),
    ]
    assert [row.metric("top1") for row in comparison_rows([], found, seed=0)] == [0.2, 0.1]
