"""Examples of the report: of the best checkpoint, where the recipe measures; keys of scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support.sites import here, made
from support.tiny_pipeline import Walk
from tasks.report.report import ReportData
from tasks.stages.publish import report_stage

pytestmark = pytest.mark.full  # a whole run is in its fixture


@pytest.mark.parametrize("measured", ["top1_states", "top1"])
def test_examples_are_of_the_checkpoint_that_agrees_most_with_its_base_model(
    tiny_run: Walk, tmp_path: Path, measured: str
) -> None:
    (trained,) = tiny_run.results
    cells = [
        replace(
            trained,
            cell=trained.cell.model_copy(update={"tau": tau}),
            evaluations={
                "WT": made(tmp_path, "evaluate", **{measured: value, "ppl_umim": 9.0 + tau}),
                "WT + FT": made(
                    tmp_path, "evaluate", **{measured: 0.99}
                ),  # adapted to another text
            },
        )
        for tau, value in ((3, 0.2), (4, 0.7), (5, 0.6))
    ]
    call = report_stage(recipe=tiny_run.recipe, results=cells)
    page = call.build(here(tmp_path)).path / "report.json"
    data = ReportData.model_validate_json(page.read_text("utf-8"))
    label = "backbone, τ 4 on held-out text (highest Top-1 of 3 checkpoints)"
    assert [example["label"] for example in data.examples] == [label]
