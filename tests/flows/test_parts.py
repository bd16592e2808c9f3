"""Parts of a flow: what they hand on, in which order, and where it is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from flows import parts
from flows.planner import Planner
from support.small_recipe import least_recipe
from tasks.cluster.lease import ClusterLease
from tasks.run.pipeline import PipelineRun, site_of
from tasks.run.stage import Artifact, StageCall
from umim_core.adaptation.settings import WT
from umim_core.config.adaptation_recipe import AdaptationRecipe
from umim_core.config.recipe import Recipe

ADAPT = {"sft": {"max_steps": 1}, "dpo": {"max_steps": 1}}


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
        (made.stage.name, label.rpartition(" ")[2]): made.arguments.get("config", made)
        for made, label in run.given
        if label.startswith(("umim-docs-gpt2 (shipped)", "umim-docs-gpt2 base"))
    }
    evaluate, benchmark = asked.headline.evaluate, asked.headline.benchmark
    assert given.pop(("evaluate", "WT")) == evaluate
    assert given.pop(("benchmark", "(shipped)")) == benchmark
    assert {*given} == {("task-score", "WT"), ("task-score", "base")}
    assert {made.arguments["limit"] for made in given.values()} == {evaluate.task_questions}


def test_without_its_backbone_the_run_goes_on_and_says_so_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run: Any = Recorder(recipe_with("umim-no-such-checkpoint"))
    assert [result.name for result in parts.run_everything(run)] == ["", "umim-docs-llama"]
    (line,) = caplog.messages
    assert line.startswith("the row of umim-no-such-checkpoint is left out: ")
    assert "\n" not in line


class Backwards(Recorder):
    """A plan whose independent parts end in the opposite order."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.registered: list[tuple[str, Path]] = []

    def run_parallel(self, parts: Sequence[Callable[[], Any]], **_: bool) -> list[Any]:
        return [part() for part in reversed(parts)][::-1]

    def register(self, backbone: str, trained: Artifact) -> None:
        self.registered.append((backbone, trained.path))


@pytest.fixture
def recipe() -> Recipe:
    cells = [{"backbone": "umim-docs-llama", "tau": tau, "adapt": tau == 5} for tau in (5, 50)]
    return least_recipe(cells=cells, task={}, adapt=ADAPT)


def test_a_plan_counts_once_what_is_built_once(recipe: Recipe) -> None:
    other = recipe.cells[0].model_copy(update={"revision": "0" * 40})
    cells = {"cells": (*recipe.cells, other), "shipped": ("umim-docs-llama",)}
    shared = recipe.model_copy(update=cells)
    scored = [step["of"] for step in parts.plan(shared) if step["stage"] == "task-score"]
    # Of two cells and a shipped checkpoint, and of another revision.
    assert scored.count("umim-docs-llama base") == 2
    assert "umim-docs-llama (shipped) WT" in scored
    curves = {"name": "c", "kind": "adaptation", "questions": {"kind": "docstrings"}, **ADAPT}
    curves |= {"checkpoints": ["umim-docs-llama", "umim-docs-llama-adapted"], "taus": [5]}
    two_forms = AdaptationRecipe.model_validate(curves | {"controls": ["lora"]})
    of_controls = [step["stage"] for step in parts.plan(two_forms) if "lora" in step["of"]]
    assert of_controls == ["control", "choice-scores"]
    assert sum(" base" in step["of"] for step in parts.plan(two_forms)) == 1


def test_checkpoints_are_registered_in_the_order_of_cells(recipe: Recipe) -> None:
    run: Any = Backwards(recipe)
    cells = parts.run_everything(run)
    first, second = (cell.settings[WT] for cell in cells)
    assert int(first.key) > int(second.key)  # the second was made first
    assert run.registered == [("umim-docs-llama", made.path) for made in (first, second)]


def test_the_alias_of_a_backbone_is_the_first_checkpoint_of_it(
    recipe: Recipe, tmp_path: Path
) -> None:
    registry = MagicMock()
    run = PipelineRun(recipe, tmp_path, ClusterLease(recipe.cluster), registry, "key")
    for backbone, key in (("a", "1"), ("b", "2"), ("a", "3")):
        run.register(backbone, Artifact("distill", key, tmp_path / key, "", executed=True))
    wanted = [
        call(name, tmp_path / key / "checkpoint", key) for name, key in (("a", "1"), ("b", "2"))
    ]
    assert registry.register_checkpoint.mock_calls == wanted


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
