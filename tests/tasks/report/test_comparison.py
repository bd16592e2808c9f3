"""Rows of the comparison: names in MLflow, columns, the ablation, whose examples are shown."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from support.sites import here, made
from support.tiny_pipeline import Walk
from support.tracked_runs import runs_of
from tasks.cluster.lease import ClusterLease
from tasks.report.ablation import ablation_page, ablation_table, ablation_text
from tasks.report.comparison import (
    ComparisonRow,
    cell_row,
    comparison,
    record_adaptation,
    require_own_names,
    run_label,
)
from tasks.report.render import Report
from tasks.report.report import ReportData
from tasks.run.pipeline import PipelineRun
from tasks.run.recipes import find_recipe
from tasks.stages.publish import report_stage
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
    forms += [{"revision": "abc"}, sure, sure | {"confidence_tokens": 5000}]
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
    named = [(name * 12, tau, kept) for name, tau, kept in GRID]
    text = ablation_text(data | {"cells": [cell(*which) for which in named]})
    for part in text.split("\n\n")[:2]:  # each says which row is which
        assert [line.split()[:3] for line in part.splitlines()[1:]] == [
            [name, str(tau), kept] for name, tau, kept in named
        ]
    assert "300 steps of 8 rows of 512 tokens" in text and max(map(len, text.splitlines())) <= 100


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
