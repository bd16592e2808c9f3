"""Pages of what a pipeline measured: the examples of a report, the table of an ablation."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from support.sites import here, made
from support.tiny_pipeline import Walk
from tasks.report.ablation import ablation_page, ablation_table
from tasks.report.comparison import cell_row, comparison
from tasks.report.render import Report
from tasks.report.report import ReportData
from tasks.stages.publish import report_stage
from umim_core.config.recipe import Cell


@pytest.mark.full  # a whole run is in its fixture
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


GRID = list(itertools.product(("llama", "gpt2"), (5, 50, 500), ("drop", "keep")))
MEASURES = ["TR %", "rules", "Top-1", "Top-3", "Top-10", "Top-p", "MRR", "KL"]


def cell(backbone: str, tau: int, containment: str) -> Report:
    reduction = 0.6 / tau**0.4 + 0.01 * (containment == "keep")
    metrics = {"token_reduction": reduction, "rules": 9e4 / tau, "top1": 1 - reduction}
    metrics |= {"top3": 0.7, "top10": 0.71, "topp": 0.9, "mrr": 0.8, "kl": 2 * reduction}
    named = Cell.model_validate({"backbone": backbone, "tau": tau, "containment": containment})
    row = cell_row(named, metrics=metrics).model_dump(mode="json")
    return {"row": row, "training": {"steps": 300.0}, "trained_on": "Linux"}


def test_an_ablation_shows_what_differs_and_what_was_measured() -> None:
    data = {"budget": {"steps": 300, "rows": 8, "tokens": 512}, "seed": 17, "name": "grid"}
    data |= {"description": "All.", "evaluation": {}, "machine": {}, "versions": {}}
    data |= {"cells": [cell(*which) for which in GRID]}
    table, page = ablation_table(data), ablation_page(data)
    assert table.headings == ("backbone", "τ", "containment", *MEASURES)
    assert [row[:3] for row in table.rows] == [(b, str(t), c) for b, t, c in GRID]
    assert table.rows[0][3:6] == ("31.5", "18,000", "0.6848")
    assert "Which rows are unit ends depends on the rules" in page
    assert "300 steps of 8 rows of 512 tokens (1,228,800 tokens), seed 17." in page
    fewer = cell("llama", 5, "drop") | {"training": {"steps": 40.0}, "withdrawn": ["ppl_umim"]}
    page = ablation_page(data | {"cells": [cell("llama", 5, "drop"), fewer]})
    assert "1 of 2 cells stopped earlier, at least 40." in page and "†: withdrawn." in page


def test_every_difference_has_a_column() -> None:
    rows = [
        cell_row(Cell(backbone="b")),
        cell_row(Cell(backbone="b", depth=3, module_positions="learned")),
        cell_row(Cell(backbone="b", kind="linear", overlap="none")),
        cell_row(Cell(backbone="b", source="confidence", min_probability=0.6)),
    ]
    shown = comparison(rows)
    first = shown.headings.index("rules by")
    names = ("rules by", "overlap", "containment", "positions", "depth", "kind")
    assert shown.headings[first : first + 6] == names
    assert [row[first : first + 6] for row in shown.rows] == [
        ("frequency", "greedy", "drop", "none", "1", "attention"),
        ("frequency", "greedy", "drop", "learned", "3", "attention"),
        ("frequency", "none", "drop", "none", "1", "linear"),
        ("confidence 0.6", "none", "keep", "none", "1", "attention"),
    ]
