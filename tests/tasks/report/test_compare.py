"""Names of the comparison's rows in MLflow's lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from support.sites import made
from support.tracked_runs import runs_of
from tasks.cluster.lease import ClusterLease
from tasks.report.comparison import (
    ComparisonRow,
    cell_row,
    record_adaptation,
    require_own_names,
    run_label,
)
from tasks.run.pipeline import PipelineRun
from tasks.run.recipes import find_recipe
from tasks.tracking.compare_view import ADAPTATION_SOURCE
from tasks.tracking.tracker import Tracker
from umim_core.config.recipe import DEFAULT_TASK, Cell
from umim_core.errors import ConfigError
from umim_core.store.artifacts import write_json


def test_policies_forms_and_chosen_spans_tell_cells_apart_everywhere() -> None:
    inside: dict[str, object] = {"residual": "last", "unit_positions": "preserved"}
    forms = [{"spans": spans} for spans in (1000, 2000)]
    forms += [{"merge_depth": depth, **inside} for depth in (1, 2)]
    forms += [{"adapter_rank": 4}, {}, {"tau": 50}, {"tau": 50, "module_positions": "learned"}]
    sure = {"source": "confidence"}
    forms += [{"rule_budget": 9000}, {"revision": "abc"}, sure, sure | {"confidence_tokens": 5000}]
    forms += [{"containment": "keep", "module_positions": "learned"}]
    cells = [Cell.model_validate({"backbone": "umim-docs-llama", **form}) for form in forms]
    rows = [cell_row(cell) for cell in cells]
    require_own_names("novels", cells)
    assert len({run_label(row) for row in rows}) == len({row.label for row in rows}) == len(cells)
    assert run_label(rows[-1]) == "WT τ 5 docs-llama (keep, learned positions)"
    assert len({str(row.params()) for row in rows}) == len(cells)
    read = [ComparisonRow.model_validate(row.model_dump(mode="json")) for row in rows]
    assert read == rows


def test_cells_that_would_share_a_name_are_refused() -> None:
    cells = [Cell(backbone=f"{owner}/Llama-3.2-1B") for owner in ("meta-llama", "unsloth")]
    with pytest.raises(ConfigError, match="a name of its own"):
        require_own_names("novels", cells)


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


def test_every_point_is_a_row_that_the_link_of_the_run_filters(store: str, tmp_path: Path) -> None:
    def build(out: Path) -> None:
        write_json(out / "adaptation.json", BODY)

    recipe: Any = find_recipe("adaptation/docstrings-llama")
    tracker = Tracker(store, tmp_path)
    tracker.pipeline_run("p", {"recipe": "tiny"}, name="tiny")
    agreement = {"token_reduction": 0.5, "top1": 0.5, "kl": 0.5}
    tracker.comparison_run("p", "row", "a row", {"setting": "of a pipeline"}, agreement)
    other, change = {"setting": "of another task", "task": "another task"}, {"difference": 0.5}
    tracker.comparison_run("p", "other", "a point", other, change, source=ADAPTATION_SOURCE)
    with ClusterLease(recipe.cluster) as lease:
        run = PipelineRun(recipe, tmp_path, lease, tracker, "p")
        adaptation = made(tmp_path, "adaptation", build, points=2.0)
        record_adaptation(run, adaptation)
        record_adaptation(run, adaptation)  # equal rows are found, not added
        query = unquote(run.link().partition("searchFilter=")[2])
    rows = sorted(runs_of(store, query=query), key=lambda row: row.data.params["setting"])
    assert [row.data.params["setting"] for row in rows] == ["WT + Rules", "base", "lora"]
    assert rows[0].data.params["model"] == "docs-llama" and rows[0].data.params["tau"] == "5"
    for row in (rows[0], rows[2]):  # the base model has no difference to itself
        assert {"token_reduction", "difference"} <= set(row.data.metrics)
    assert rows[2].data.metrics["difference"] == 0.25
