"""Report page: whose numbers its cards show, where checkpoints lie, its speeds."""

from __future__ import annotations

import re
from pathlib import Path
from uuid import uuid4

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.report.compare import cell_row
from tasks.report.comparison import ComparisonRow, Measured
from tasks.report.comparison_table import comparison
from tasks.report.label_placement import place_labels
from tasks.report.report_data import CheckpointPlace, LossCurve, ReportData, SpeedRow
from tasks.report.report_drawing import legend
from tasks.report.report_figures import draw_figures
from tasks.report.report_page import write_report
from tasks.report.report_tables import tables
from tasks.run import pipeline
from umim_core.checkpoint.next_steps import after_training
from umim_core.config.recipe import DEFAULT_TASK, Cell

Scores = dict[tuple[str, str], dict[str, Measured]]
MODEL = "/data/models/stories260K"


def row(scores: Scores | None = None, **fields: object) -> ComparisonRow:
    metrics = {"token_reduction": 0.35, "top1": 0.47, "kl": 1.4, "ppl_base": 20.0, "ppl_umim": 30.0}
    cell = Cell.model_validate({"backbone": MODEL} | fields)
    return cell_row(cell, metrics=metrics, scores=scores or {})


def pages(out: Path, **fields: object) -> tuple[str, str]:
    write_report(out, ReportData(recipe="r", **fields))
    return (out / "report.html").read_text("utf-8"), (out / "report.md").read_text("utf-8")


def test_all_cards_are_of_one_setting(tmp_path: Path) -> None:
    found = {"base": 0.612, "WT": 0.498, "Task-Adapted": 0.587}
    scores = {(DEFAULT_TASK, name): {"acc_tok": Measured(value=v)} for name, v in found.items()}
    page, _ = pages(tmp_path, rows=(row(scores),))
    (tiles,) = re.findall(r'<div class="tiles">(.*?)<p class="note">', page, re.DOTALL)
    assert "61.2 → 49.8" in tiles and "58.7" not in tiles
    assert '<p class="note">stories260K, τ 5, WT</p>' in page


def test_an_address_that_no_browser_opens_is_no_link(tmp_path: Path) -> None:
    links = {"MLflow": "http://127.0.0.1:5000/#/x", "Prefect": "None/flow-runs/flow-run/1"}
    for text in pages(tmp_path, links=links):
        assert "http://127.0.0.1:5000/#/x" in text
        assert "Prefect" not in text


def test_checkpoints_are_shown_with_commands_to_copy(tmp_path: Path) -> None:
    places = tuple(
        CheckpointPlace(
            label=f"stories260K, τ {tau}, WT", path=f"/artifacts/distill/{tau}/checkpoint"
        )
        for tau in (5, 50)
    )
    page, text = pages(tmp_path, checkpoints=places)
    for place in places:
        for line in after_training(place.path):
            assert line.strip() in text
            assert line.strip().replace("'", "&#x27;") in page
        assert f"{place.label}: <code>{place.path}</code>" in page


def test_labels_show_the_last_part_of_a_path_and_whole_names_of_hubs(tmp_path: Path) -> None:
    assert row().label == "stories260K, τ 5"
    assert row(backbone="owner/model").label == "owner/model, τ 5"
    page, text = pages(tmp_path, rows=(row(), row(tau=50)))
    assert MODEL not in page and MODEL not in text


def test_columns_that_nobody_measured_are_left_out() -> None:
    table = comparison([row(), row(tau=50)])
    assert table.headings == ("backbone", "τ", "setting", "TR %", "Top-1", "PPL base", "PPL UMIM")
    assert "PPL:" in table.note and "acc." not in table.note and "prefill" not in table.note
    made = {table.title: table for table in tables(ReportData(recipe="r", rows=(row(),)))}
    assert made["Alignment with the base model"].headings == ("rules", "setting", "Top-1", "KL")


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
    assert figure.svg.count("Speed, UMIM / base</text>") == 2
    assert figure.svg.count("llama, pairs</text>") == 1


def test_two_prompt_lengths_are_a_table_and_no_figure() -> None:
    data = ReportData(recipe="r", throughput=speeds(256, 512))
    assert draw_figures(data) == []
    assert [table.title for table in tables(data)] == ["Throughput"]


@pytest.mark.parametrize("quantity", ["KL", "preference"])
def test_the_gap_between_training_and_validation_is_explained(quantity: str) -> None:
    curve = LossCurve(label="llama", train=((1, 3.0),), validation=((1, 2.0),), quantity=quantity)
    (figure,) = draw_figures(ReportData(recipe="r", curves=(curve,)))
    assert ("rules match more often there" in figure.caption) is (quantity == "KL")


@pytest.mark.parametrize("text", ["τ 5", "stories260K, τ 5 (learned positions, shipped)"])
def test_a_label_stands_next_to_its_point(text: str) -> None:
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    canvas, axes = FigureCanvasAgg(figure), figure.add_subplot()
    axes.plot([0.0], [0.0], "o")
    place_labels(axes, [(0.0, 0.0, text, "black")])
    canvas.draw()
    (label,) = axes.texts
    box, (x, y) = label.get_window_extent(), axes.transData.transform((0.0, 0.0))
    apart = (max(box.x0 - x, x - box.x1, 0.0), max(box.y0 - y, y - box.y1, 0.0))
    assert 72 / figure.dpi * (apart[0] ** 2 + apart[1] ** 2) ** 0.5 < 10  # points


def test_a_long_name_in_the_legend_is_broken_into_lines_that_fit() -> None:
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    words = "umim-docs-llama, τ 5 (" + ", ".join(["a policy of its form"] * 5) + ", shipped)"
    legend(figure, [(words, 0), ("short", 1)])
    canvas.draw()
    (drawn,) = figure.legends
    assert drawn.get_window_extent().x1 <= figure.bbox.x1
    assert " ".join(drawn.get_texts()[0].get_text().splitlines()) == words


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
