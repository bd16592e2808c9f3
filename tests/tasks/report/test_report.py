"""The report: one offline page that says what the data says, the same bytes every time."""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from hashlib import sha256
from html import unescape
from pathlib import Path
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.report.comparison import TASK_TR, ComparisonRow, Measured, cell_row, comparison, summary
from tasks.report.render import Report
from tasks.report.report import ReportData, draw_figures, leading, report_tables, write_report
from tasks.run import pipeline
from umim_core.config.recipe import DEFAULT_TASK, Cell

FIGURES = {"saving", "accuracy", "losses", "speed"}


Scores = dict[tuple[str, str], dict[str, Measured]]


def score(setting: str, value: float, reduction: float) -> Scores:
    found = {"acc_tok": Measured(value=value, stderr=0.013), TASK_TR: Measured(value=reduction)}
    return {(DEFAULT_TASK, setting): found}


FULL = {"token_reduction": 0.352, "top1": 0.472, "top3": 0.51, "mrr": 0.61, "kl": 1.41}
FULL |= {"ppl_base": 22.9, "ppl_umim": 58.2, "prefill_speedup": 1.31}
FULL |= {"ppl_base_ood_stdlib": 64.1, "ppl_umim_ood_stdlib": 1120.9}
PART = {"top1": math.nan, "ppl_base": None, "ppl_umim": 12.0, "token_reduction": 0.1}
SCORES = score("base", 0.612, 0.0) | score("WT", 0.498, 0.31) | score("Task-Adapted", 0.587, 0.22)
ROWS = (
    cell_row(Cell(backbone="llama"), metrics=FULL, scores=SCORES),
    ComparisonRow(backbone="gpt2", rule_source="explicit", source="shipped", metrics=PART),
)


def speed(label: str, prompt: int, base: float, phase: str = "prefill") -> Report:
    """A speed of 1.5 times the base model's."""
    speeds = {"base_tokens_per_s": base, "umim_tokens_per_s": 1.5 * base}
    unknown = dict.fromkeys(("token_reduction", "bound", "base_kv_bytes", "umim_kv_bytes"))
    sizes = {"phase": phase, "prompt_tokens": prompt, "batch_size": 1}
    return {"label": label, **sizes, **speeds, **unknown}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report; written once, for its figures take two seconds."""
    data = ReportData(
        recipe="tiny <recipe>",
        config={"taus": [5, 50]},
        host={"processor": "2 cores"},
        rows=ROWS,
        curves=(
            {"label": "llama", "train": [(1, 3.0), (2, None)], "validation": [(2, 2.5)]}
            | {"quantity": "KL"},
        ),
        throughput=tuple(speed("llama", size, 1000) for size in (256, 512, 1024)),
        rule_counts=({"label": "docs", "raw": {"2": 12345}, "overlap": {}, "rules": {"2": 7}},),
        examples=({"label": "llama", "spans": [("a <b>", 3), (" & c", 1), (" d e", 2)]},),
        chance={DEFAULT_TASK: 0.25},
    )
    folder = tmp_path_factory.mktemp("report")
    write_report(folder, data)
    return folder


def cells_of(out: Path) -> list[str]:
    page = (out / "report.html").read_text()
    return [unescape(cell) for cell in re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", page)]


def test_the_page_fetches_nothing_and_runs_its_own_script_alone(written: Path) -> None:
    text = (written / "report.html").read_text()
    tags = re.findall(r"<([a-z]\w*)", text)
    assert not {"link", "iframe", "img", "object", "audio", "video", "embed", "form"} & {*tags}
    assert re.findall(r'\s(?:src|srcset|data|poster|action)="[^"]', text) == []
    assert set(re.findall(r'href="(.)', text)) <= {"#"}
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = b64encode(sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text and tags.count("script") == 1
    assert "@import" not in text and "default-src 'none'" in text
    assert set(re.findall(r"url\(([^)]{1,2})", text)) <= {"#a", "#p", "#l", "#s"}
    ids = re.findall(r'\sid="([^"]+)"', text)
    assert {f"figure-{name}" for name in FIGURES} <= set(ids)
    assert len(ids) == len(set(ids))


def test_merged_spans_are_marked_by_length_and_text_is_escaped(written: Path) -> None:
    text = (written / "report.html").read_text()
    block = re.search(r'<div class="spans">(.*?)</div>', text, re.DOTALL)
    assert block is not None
    assert block[1] == ('<span class="n3">a &lt;b&gt;</span> &amp; c<span class="n2"> d e</span>')
    assert "6 tokens, 3 units, TR 50.0 %" in text
    assert "tiny &lt;recipe&gt;" in text


def test_what_was_not_measured_is_a_dash_everywhere(written: Path) -> None:
    cells = cells_of(written)
    assert "–" in cells
    assert not {"nan", "None", "NaN", "inf"} & set(cells)
    assert json.loads((written / "report.json").read_text())["rows"][1]["metrics"]["top1"] is None


def test_the_page_shows_the_numbers_of_the_data(written: Path) -> None:
    cells = cells_of(written)
    for shown in ("35.2", "0.472", "22.90", "58.20", "1.31", "1,120.90", "12,345"):
        assert shown in cells
    assert {"61.2 ± 1.3", "58.7 ± 1.3"} <= set(cells)
    assert "1.50" in cells  # 1500 / 1000 tokens per second


MODEL = "/data/models/stories260K"


def row(scores: Scores | None = None, **fields: object) -> ComparisonRow:
    metrics = {"token_reduction": 0.35, "top1": 0.47, "kl": 1.4, "ppl_base": 20.0, "ppl_umim": 30.0}
    cell = Cell.model_validate({"backbone": MODEL} | fields)
    return cell_row(cell, metrics=metrics, scores=scores or {})


def test_the_cards_are_of_the_row_that_is_featured_or_agrees_most_and_say_so(
    tmp_path: Path,
) -> None:
    best = row(tau=50).model_copy(update={"metrics": {"top1": 0.9, "token_reduction": 0.125}})
    data = ReportData(recipe="r", rows=(row(), best, row(tau=500)))
    found, label = leading(data)
    assert found is best
    assert label == "stories260K, τ 50, WT: highest Top-1 of 3 checkpoints in setting WT"
    write_report(tmp_path, data)
    cards = re.findall(r'class="card"><b>(.*?)</b>', (tmp_path / "report.html").read_text())
    assert cards == ["12.5 %", "0.900"]
    shipped, config = row().model_copy(update={"source": "shipped"}), {"headline": {}}
    _, label = leading(ReportData(recipe="r", rows=(shipped, best), config=config))
    assert label.endswith("(shipped), WT: featured by the recipe")


def test_columns_that_nobody_measured_are_left_out() -> None:
    table = comparison([row(), row(tau=50)])
    assert table.headings == ("backbone", "τ", "setting", "TR %", "Top-1", "PPL base", "PPL UMIM")
    assert "PPL:" in table.note and "acc." not in table.note and "prefill" not in table.note
    text = report_tables(ReportData(recipe="r", rows=(row(),)))
    _, _, aligned = text.partition("## Alignment with the base model\n\n")
    heads = [cell.strip() for cell in aligned.splitlines()[0].strip("|").split("|")]
    assert heads == ["rules", "setting", "Top-1", "KL"]


LIMITS = {"alignment_rows": 16, "perplexity_rows": 8, "task_questions": 200}


@pytest.mark.parametrize(
    ("read", "scored", "headline", "words"),
    [
        ({}, {}, False, "16 (Top-1) and 8 (PPL) rows of 64 tokens"),
        ({"alignment_rows": 3.0}, {}, False, "3 (Top-1) and 8 (PPL) rows of 64 tokens"),
        ({"alignment_rows": None}, {}, False, "16 (Top-1) and 8 (PPL) rows of 64 tokens"),
        ({}, {"questions": 37.0}, False, "16 (Top-1) and 8 (PPL) rows of 64 tokens, 37 questions"),
        ({}, {"acc": 0.5}, False, "16 (Top-1) and 8 (PPL) rows of 64 tokens, 200 questions"),
        ({}, {}, True, "16 (Top-1) and 8 (PPL) rows of 64 tokens; m: 4 (Top-1) and 4 (PPL) rows of "
                       "64 tokens, timed at 1,024 tokens"),
    ],
    ids=["asked for", "a short text", "a null", "few questions", "a former one", "a headline"],
)  # fmt: skip
def test_a_note_says_what_was_measured_and_nothing_of_what_was_not(
    read: dict[str, float | None], scored: dict[str, float], headline: bool, words: str
) -> None:
    scores = {(DEFAULT_TASK, "WT"): {name: Measured(value=n) for name, n in scored.items()}}
    own = cell_row(Cell(backbone="b"), metrics=read, scores=scores if scored else {})
    shipped = ComparisonRow(backbone="m", source="shipped")
    amounts = {"alignment_rows": 4, "perplexity_rows": 4, "task_questions": 50}
    config = {"segment_length": 64, "evaluate": LIMITS}
    config |= {"headline": {"evaluate": amounts, "benchmark": {"prompt_lengths": [1024]}}}
    rows = [shipped, own] if headline else [own]
    for table in (comparison(rows, config), summary(rows, config)):
        assert table.note.endswith(f"Measured on {words}.")
        assert ("acc." in table.note) <= bool(scored) and "prefill" not in table.note
    assert ("WT + FT" in summary(rows, config).note) is False


def speeds(*lengths: int) -> tuple[Report, ...]:
    return tuple(
        speed(f"llama, {rules}", length, 100, phase)
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


def test_base_models_of_one_name_have_a_point_for_each_accuracy() -> None:
    rows = [row(score("base", value, 0.0) | score("WT", 0.4, 0.2)) for value in (0.6, 0.6, 0.5)]
    figures = draw_figures(ReportData(recipe="x", rows=tuple(rows)))
    (drawn,) = (one.figure for one in figures if one.name == "accuracy")
    points = [line.get_xydata()[0].tolist() for line in drawn.axes[0].get_lines()]
    assert [points.count([0.0, y]) for y in (50.0, 60.0)] == [1, 1]
