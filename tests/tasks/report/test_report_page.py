"""Report page: whose numbers its cards show, where checkpoints lie, its speeds."""

from __future__ import annotations

from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.report.compare import cell_row
from tasks.report.comparison import ComparisonRow, Measured
from tasks.report.comparison_table import comparison
from tasks.report.report_data import ReportData, SpeedRow
from tasks.report.report_page import cards, draw_figures, report_tables
from tasks.run import pipeline
from umim_core.config.recipe import Cell

Scores = dict[tuple[str, str], dict[str, Measured]]
MODEL = "/data/models/stories260K"


def row(scores: Scores | None = None, **fields: object) -> ComparisonRow:
    metrics = {"token_reduction": 0.35, "top1": 0.47, "kl": 1.4, "ppl_base": 20.0, "ppl_umim": 30.0}
    cell = Cell.model_validate({"backbone": MODEL} | fields)
    return cell_row(cell, metrics=metrics, scores=scores or {})


def test_the_cards_are_of_the_row_that_agrees_most_and_say_so() -> None:
    best = row(tau=50).model_copy(update={"metrics": {"top1": 0.9, "token_reduction": 0.125}})
    made = cards(ReportData(recipe="r", rows=(row(), best, row(tau=500))))
    assert made is not None
    assert made["label"] == "stories260K, τ 50, WT: highest Top-1 of 3 checkpoints in setting WT"
    assert made["cards"][0] == {"name": "token reduction", "value": "12.5 %"}


def test_the_cards_are_of_the_row_that_the_recipe_features() -> None:
    shipped = row(tau=50).model_copy(update={"source": "shipped"})
    config = {"headline": {"checkpoint": "x"}}
    best = row().model_copy(update={"metrics": {"top1": 0.9}})
    made = cards(ReportData(recipe="r", rows=(shipped, best), config=config))
    assert made is not None and made["label"].endswith("(shipped), WT: featured by the recipe")
    other = cards(ReportData(recipe="r", rows=(shipped, best)))
    assert other is not None and "highest Top-1 of 2 checkpoints" in other["label"]


def test_columns_that_nobody_measured_are_left_out() -> None:
    table = comparison([row(), row(tau=50)])
    assert table.headings == ("backbone", "τ", "setting", "TR %", "Top-1", "PPL base", "PPL UMIM")
    assert "PPL:" in table.note and "acc." not in table.note and "prefill" not in table.note
    text = report_tables(ReportData(recipe="r", rows=(row(),)))
    _, _, aligned = text.partition("## Alignment with the base model\n\n")
    heads = [cell.strip() for cell in aligned.splitlines()[0].strip("|").split("|")]
    assert heads == ["rules", "setting", "Top-1", "KL"]


def speeds(*lengths: int) -> tuple[SpeedRow, ...]:
    return tuple(
        SpeedRow(
            label=f"llama, {rules}",
            phase=phase,
            prompt_tokens=length,
            base_tokens_per_s=100,
            umim_tokens_per_s=150,
        )
        for rules in ("pairs", "natural rules")
        for phase in ("prefill", "decode", "request")
        for length in lengths
    )


def test_speed_has_a_panel_per_phase_and_a_line_per_rules() -> None:
    (figure,) = draw_figures(ReportData(recipe="r", throughput=speeds(256, 512, 1024)))
    assert figure.name == "speed"
    assert [axes.get_ylabel() for axes in figure.figure.axes] == ["Speed, UMIM / base"] * 2
    (legend,) = figure.figure.legends
    assert [text.get_text() for text in legend.get_texts()].count("llama, pairs") == 1


@pytest.mark.parametrize("server", [None, "http://127.0.0.1:4200/api"])
def test_a_run_links_to_prefect_only_where_a_server_shows_pages(server: str | None) -> None:
    run = FlowRun(flow_id=uuid4())
    with (
        temporary_settings({PREFECT_API_URL: server}),
        FlowRunContext.model_construct(flow_run=run),
    ):
        found = pipeline._prefect_url()
        assert found == (server and f"http://127.0.0.1:4200/flow-runs/flow-run/{run.id}")
        assert server or flow_run.ui_url.startswith("None/")  # what Prefect makes of it
