"""An evaluation killed half-way goes on with the measurement it was at (reliability 22).

A setting's alignment and perplexity are one stage, its score on a task is another. What a killed
run had measured is found, untouched; the rest is measured, and equals an undisturbed run.
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from support.tiny_pipeline import Walk, stages_in, walk, walk_until
from support.training_processes import exit_codes, start_ranks

pytestmark = pytest.mark.full  # a whole run is in its fixture

MEASURED = ("evaluate", "task-score")
# The function at whose call the process kills itself, which call, when; and what is measured then.
POINTS = {
    "before anything": (("tasks.stages.evaluate.evaluate_alignment", 1, "before"), []),
    "inside an evaluation": (("tasks.stages.evaluate.perplexity_figures", 2, "after"), []),
    "behind the score of a task": (
        ("tasks.stages.evaluate.evaluate_task", 2, "after"),
        ["evaluate", "task-score", "evaluate"],
    ),
    "between two tasks": (
        ("tasks.stages.evaluate.evaluate_task", 3, "before"),
        ["evaluate", "task-score", "evaluate", "task-score", "evaluate"],
    ),
    "before the last": (
        ("tasks.stages.evaluate.evaluate_task", 5, "before"),
        ["evaluate", "task-score"] * 4,
    ),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_evaluation_measures_nothing_twice(
    tiny_run: Walk, tmp_path: Path, point: str
) -> None:
    place, measured = POINTS[point]
    root = tmp_path / "root"
    later = shutil.ignore_patterns(*MEASURED, "benchmark", "report")
    shutil.copytree(tiny_run.root, root, ignore=later)
    recipe = tiny_run.recipe.model_copy(update={"benchmark": None})
    run = start_ranks(tmp_path, 1, walk_until, root, recipe.model_dump_json(), *place)
    log = tmp_path / "rank-0.log"
    assert exit_codes(run) == [-signal.SIGKILL], log.read_text("utf-8")
    before = stages_in(root, MEASURED)
    assert len(before) == len(measured)
    again = walk(root, recipe)
    everything = [call.name for call in tiny_run.calls if call.name in MEASURED]
    assert everything[: len(measured)] == measured
    assert again.executed() == everything[len(measured) :]
    assert again.digests() == tiny_run.digests()
    after = stages_in(root, MEASURED)
    assert {name: after[name] for name in before} == before, "what was measured is not touched"
