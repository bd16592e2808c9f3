from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import pytest

from support.sites import made
from support.tracked_runs import runs_of
from tasks.cluster.lease import ClusterLease
from tasks.report.compare import record_adaptation
from tasks.run.pipeline import PipelineRun
from tasks.run.recipes import find_recipe
from tasks.run.stage import Artifact
from tasks.tracking.compare_view import ADAPTATION_SOURCE
from tasks.tracking.tracker import Tracker
from umim_core.config.adaptation_recipe import AdaptationRecipe
from umim_core.config.recipe import DEFAULT_TASK
from umim_core.store.artifacts import write_json

BODY = {
    "task": DEFAULT_TASK,
    "backbones": [
        {
            "checkpoint": "own",
            "backbone": "umim-docs-llama",
            "base": {"accuracy": 0.5, "margin": -0.25, "token_reduction": 0.0},
            "points": [
                {"setting": "WT + Rules", "tau": 5, "seed": None, "token_reduction": 0.25,
                 "accuracy": 0.375, "difference": -0.125, "difference_se": 0.0625},
                {"setting": "lora", "tau": None, "seed": 1, "token_reduction": 0.0,
                 "accuracy": 0.75, "difference": 0.25, "difference_se": 0.125},
            ],
        }
    ],
}  # fmt: skip


def _adaptation(root: Path) -> Artifact:
    def build(out: Path) -> None:
        write_json(out / "adaptation.json", BODY)
        (out / "adaptation.md").write_text("# Page\n", "utf-8")

    return made(root, "adaptation", build, points=2.0)


@pytest.fixture(scope="module")
def recipe() -> AdaptationRecipe:
    found = find_recipe("adaptation/docstrings-llama")
    assert isinstance(found, AdaptationRecipe)
    return found


def test_every_point_is_a_row_that_the_link_of_the_run_filters(
    recipe: AdaptationRecipe, store: str, tmp_path: Path
) -> None:
    tracker = Tracker(store, tmp_path)
    tracker.pipeline_run("p", {"recipe": "tiny"}, name="tiny")
    agreement = {"token_reduction": 0.5, "top1": 0.5, "kl": 0.5}
    tracker.comparison_run("p", "row", "a row", {"setting": "of a pipeline"}, agreement)
    other, change = {"setting": "of another task", "task": "another task"}, {"difference": 0.5}
    tracker.comparison_run("p", "other", "a point", other, change, source=ADAPTATION_SOURCE)
    with ClusterLease(recipe.cluster) as lease:
        run: PipelineRun[AdaptationRecipe] = PipelineRun(recipe, tmp_path, lease, tracker, "p")
        adaptation = _adaptation(tmp_path)
        record_adaptation(run, adaptation)
        record_adaptation(run, adaptation)  # equal rows are found, not added
        query = unquote(run.link().partition("searchFilter=")[2])
    rows = sorted(runs_of(store, query=query), key=lambda row: row.data.params["setting"])
    assert [row.data.params["setting"] for row in rows] == ["WT + Rules", "base", "lora"]
    assert rows[0].data.params["model"] == "docs-llama" and rows[0].data.params["tau"] == "5"
    for row in (rows[0], rows[2]):  # the base model has no difference to itself
        assert {"token_reduction", "difference"} <= set(row.data.metrics)
    assert rows[2].data.metrics["difference"] == 0.25
