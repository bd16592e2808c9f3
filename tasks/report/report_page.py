"""Report of a pipeline run: one offline HTML page, the same as Markdown, JSON.

``ReportData`` in, files out: nothing is measured, fetched or timed here, so equal data makes equal
bytes. The page makes no request; its one script sorts and filters tables. It follows the reader's
light or dark.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tasks.report.charts import svg_file
from tasks.report.comparison import TASK_TR, ComparisonRow
from tasks.report.comparison_table import STATES, comparison, with_error
from tasks.report.render import Report, environment, html, markdown_html, page
from tasks.report.report_data import ReportData
from tasks.report.report_figures import FIRST, ReportFigure, draw_figures
from tasks.report.tables import DASH, shown, table_markdown
from umim_core.adaptation.settings import BASE, WT
from umim_core.checkpoint.next_steps import after_training
from umim_core.config.recipe import DEFAULT_TASK
from umim_core.rules.grams import ORDERS
from umim_core.store.artifacts import write_json
from umim_core.store.disk import write_bytes

_STEPS: Final = {
    "raw": "reach the threshold",
    "overlap": "after the overlap filter",
    "rules": "rules",
}
_ALIGNED: Final = ("top1", "top3", "top10", "topp", "mrr", "kl", "top1_states", "kl_states")


def write_report(out: Path, data: ReportData) -> None:
    """Write ``report.html``, ``report.md``, ``report.json`` and ``figures/*.svg``."""
    figures = draw_figures(data)
    (out / "figures").mkdir(parents=True, exist_ok=True)
    for drawn in figures:
        text = svg_file(drawn.figure, drawn.name, drawn.title)
        write_bytes(out / "figures" / f"{drawn.name}.svg", text.encode())
    values = _values(data, figures)
    write_bytes(out / "report.html", _html(data, values).encode())
    markdown = environment().get_template("report.md").render(values).strip() + "\n"
    write_bytes(out / "report.md", markdown.encode())
    write_json(out / "report.json", json.loads(data.model_dump_json()))


def _html(data: ReportData, values: Report) -> str:
    parts = {name: markdown_html(values[name]) for name in ("comparison", "tables")}
    own = {"title": f"UMIM report: {data.recipe}", "cards": cards(data)}
    return html("report.html", values | parts | own)


def _values(data: ReportData, figures: Sequence[ReportFigure]) -> Report:
    """Return what both pages show."""
    places = [
        {
            "label": place.label,
            "path": place.path,
            "commands": [x.strip() for x in after_training(place.path) if x.startswith(" ")],
        }
        for place in data.checkpoints
    ]
    first = after_training(data.checkpoints[0].path) if data.checkpoints else []
    table = comparison(data.rows, data.config) if data.rows else None
    config = json.dumps(data.config, indent=2, ensure_ascii=False, default=str)
    return {
        "data": data,
        "first": [drawn for drawn in figures if drawn.name == FIRST],
        "figures": [drawn for drawn in figures if drawn.name != FIRST],
        "links": data.addresses(),
        "comparison": "" if table is None else table_markdown(table),
        "places": places,
        "notes": [line for line in first if not line.startswith(" ")],
        "tables": report_tables(data),
        "config": config if data.config else "",
    }


def report_tables(data: ReportData) -> str:
    """Return the smaller tables that the data has rows for, in Markdown."""
    scores = [
        {
            "row": row,
            "task": task,
            "setting": setting,
            "reduction": row.score(setting, task, TASK_TR),
            "score": with_error(next(iter(score.values()))),
        }
        for row in data.base_rows()
        for (task, setting), score in row.scores.items()
    ]
    tasks = list(dict.fromkeys(str(score["task"]) for score in scores))
    values = {
        "data": data,
        "scores": scores,
        "tasks": tasks,
        "chances": {task: data.chance_of(task) for task in tasks},
        "states": STATES,
        "aligned": [r for r in data.rows if any(r.metric(n) is not None for n in _ALIGNED)],
        "perplexities": [r for r in data.rows if any(n.startswith("ppl_") for n in r.metrics)],
        "texts": {"in-domain": ""} | {corpus: f"_ood_{corpus}" for corpus in data.corpora()},
        "parts": [{"row": row, "part": part} for row in data.rows for part in row.parts],
        "rule_steps": [
            {"label": counts.label, "step": words, "counts": getattr(counts, step)}
            for counts in data.rule_counts
            for step, words in _STEPS.items()
            if getattr(counts, step)
        ],
        "orders": ORDERS,
    }
    return page("report_tables.md", values)


def cards(data: ReportData) -> Report | None:
    """Return the figures that lead the page, all of one row, and which row that is and why.

    It is the row that the recipe features, or else the one that agrees most with its base model
    before adaptation; None where no row has any of the figures.
    """
    own = data.base_rows()
    if not own:
        return None
    row, why = max(own, key=agreement), ""
    if data.config.get("headline") is not None and data.rows[0].source == "shipped":
        row, why = data.rows[0], "featured by the recipe"
    elif len(own) > 1:
        why = f"highest Top-1 of {len(own)} checkpoints in setting {WT}"
    listed = [card for card in _cards(row) if card["value"].strip(f"{DASH}→ %×")]
    label = f"{row.label}, {row.setting}" + (f": {why}" if why else "")
    return {"cards": listed, "label": label} if listed else None


def agreement(row: ComparisonRow) -> float:
    """Return a row's Top-1 at every state that decoding passes through, or else at unit ends."""
    values = (row.metric("top1_states"), row.metric("top1"))
    return next((value for value in values if value is not None), -1.0)


def _cards(row: ComparisonRow) -> list[dict[str, str]]:
    task = next(iter(row.tasks), DEFAULT_TASK)

    def number(name: str, digits: int, scale: float = 1.0) -> str:
        return shown(row.metric(name), digits, scale=scale)

    accuracies = [shown(row.score(of, task), 1, scale=100) for of in (BASE, row.setting)]
    values = {
        "token reduction": f"{number('token_reduction', 1, 100)} %",
        "Top-1 agreement with the base model": number("top1", 3),
        "perplexity, base → UMIM": f"{number('ppl_base', 1)} → {number('ppl_umim', 1)}",
        "task accuracy in %, base → UMIM": " → ".join(accuracies),
        "prefill speed, UMIM / base": f"{number('prefill_speedup', 2)}×",
    }
    return [{"name": name, "value": value} for name, value in values.items()]
