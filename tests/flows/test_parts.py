"""Parts of a flow: what they hand on, in which order, and where it is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows import parts
from support.small_recipe import least_recipe
from tasks.cluster.lease import ClusterLease
from tasks.plan.planner import Planner
from tasks.run.pipeline import site_of
from tasks.run.stage import Artifact, StageCall
from umim_core.config.recipe import Recipe


class Recorder(Planner):
    """A plan that keeps what every stage is given: calls with their labels."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.given: list[tuple[StageCall, str]] = []

    def stage(self, call: StageCall, *, label: str = "", setting: str = "") -> Artifact:
        self.given.append((call, label))
        return super().stage(call, label=label, setting=setting)


def recipe_with(checkpoint: str) -> Recipe:
    headline = {
        "checkpoint": checkpoint,
        "beside": [f"{checkpoint}-adapted"],
        "evaluate": {"alignment_rows": 3, "task_questions": 5},
        "benchmark": {"pairs": 2},
    }
    shipped = {"shipped": ["umim-docs-llama"], "benchmark": {}, "headline": headline}
    return least_recipe(**shipped)


def test_it_is_measured_on_its_own_amounts_and_leads() -> None:
    asked = recipe_with("umim-docs-gpt2")
    run: Any = Recorder(asked)
    assert [(result.name, result.leads) for result in parts.run_everything(run)] == [
        ("umim-docs-gpt2", True),
        ("umim-docs-gpt2-adapted", True),
        ("", False),  # the cell
        ("umim-docs-llama", False),
    ]
    assert asked.headline is not None
    given = {
        (made.stage.name, label.partition("(shipped)")[2]): made.arguments.get("config", made)
        for made, label in run.given
        if label.startswith("umim-docs-gpt2 (shipped)")
    }
    evaluate, benchmark = asked.headline.evaluate, asked.headline.benchmark
    assert given.pop(("evaluate", " WT")) == evaluate and given.pop(("benchmark", "")) == benchmark
    assert {*given} == {("task-score", " WT"), ("task-score", " base")}
    assert {made.arguments["limit"] for made in given.values()} == {evaluate.task_questions}


def test_without_its_backbone_the_run_goes_on_and_says_so_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run: Any = Recorder(recipe_with("umim-no-such-checkpoint"))
    assert [result.name for result in parts.run_everything(run)] == ["", "umim-docs-llama"]
    (line,) = caplog.messages
    assert line.startswith("the row of umim-no-such-checkpoint is left out: ")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("use_gpu", "expected"), [(False, ("cpu", "float32")), (True, ("cuda", "bfloat16"))]
)
def test_every_stage_that_measures_does_so_as_distillation_runs(
    use_gpu: bool, expected: tuple[str, str], tmp_path: Path
) -> None:
    cells = [{"backbone": "umim-docs-llama"} | more for more in ({}, {"source": "confidence"})]
    more = {"shipped": ["umim-docs-llama"], "benchmark": {}, "cluster": {"use_gpu": use_gpu}}
    run: Any = Recorder(least_recipe(cells=cells, **more))
    parts.run_everything(run)
    placed = {made.stage.name for made, _ in run.given if "dtype" in made.stage.of_run}
    assert placed == {"confidence", "evaluate", "task-score", "benchmark"}
    site = site_of(tmp_path, run.recipe, ClusterLease(run.recipe.cluster))
    assert (site.device, site.dtype) == expected
