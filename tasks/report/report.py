"""Report of a pipeline run: one offline HTML page with figures, and the same as JSON.

:class:`ReportData` in, files out: nothing is measured, fetched or timed here, so equal data makes
equal bytes. The page makes no request; its one script sorts and filters tables. It follows the
reader's light or dark.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from markupsafe import Markup
from matplotlib.figure import Figure
from pydantic import BaseModel, ConfigDict, Field

from tasks.report.charts import APART, Line, Panel, chart, svg, wrapped
from tasks.report.comparison import STATES, TASK_TR, ComparisonRow, comparison, summary
from tasks.report.render import Report, html, markdown_html, page, table_markdown
from umim_core.adaptation.settings import BASE, WT, setting_names
from umim_core.checkpoint.next_steps import after_training
from umim_core.config.recipe import DEFAULT_TASK
from umim_core.store.artifacts import write_json
from umim_core.store.disk import write_bytes

_FEWEST_LENGTHS: Final = 3  # a line through two points shows nothing that the table does not
_QUANTITIES: Final = {
    "preference": "Preference loss",
    "KL": "KL (nats per row)",
}


class ReportData(BaseModel):
    """Everything the report shows, in the order to be shown, as its JSON file holds it.

    Attributes:
        rows: The comparison; the first one leads the page.
        checkpoints: ``label`` and ``path`` (or the name that ``umim generate -c`` takes) of each.
        curves: Losses ``train`` and ``validation`` (step, value) of a training by its ``label``;
            ``quantity`` is KL (nats per aligned row) or preference.
        throughput: Speeds of base and UMIM in raw tokens/s (``ThroughputRow``) by ``label``.
        break_even: From which of the measured lengths on a checkpoint pays (``pays_from``).
        rule_counts: N-grams by order that reach the threshold (``raw``), pass the overlap filter
            (``overlap``), are rules (``rules``).
        examples: Texts cut into ``spans`` (text, raw tokens of the unit).
        chance: Accuracy of guessing by task, 0..1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: str
    config: dict[str, object] = Field(default_factory=dict)
    host: dict[str, str] = Field(default_factory=dict)
    rows: tuple[ComparisonRow, ...] = ()
    checkpoints: tuple[Report, ...] = ()
    curves: tuple[Report, ...] = ()
    throughput: tuple[Report, ...] = ()
    break_even: tuple[Report, ...] = ()
    rule_counts: tuple[Report, ...] = ()
    examples: tuple[Report, ...] = ()
    chance: dict[str, float] = Field(default_factory=dict)

    @property
    def task(self) -> str:
        """The task whose accuracy figures show."""
        return next((row.tasks[0] for row in self.base_rows() if row.tasks), DEFAULT_TASK)

    def base_rows(self) -> list[ComparisonRow]:
        return [row for row in self.rows if row.setting == WT]


@dataclass(frozen=True)
class ReportFigure:
    name: str
    title: str
    figure: Figure
    wide: bool = False

    @property
    def svg(self) -> Markup:
        return Markup(svg(self.figure, self.name, self.title))  # noqa: S704  # our own drawing


def draw_figures(data: ReportData) -> list[ReportFigure]:
    drawn = (_saving(data), _accuracy(data), _losses(data.curves), _speed(data.throughput))
    return [figure for figure in drawn if figure is not None]


def _saving(data: ReportData) -> ReportFigure | None:
    """Draw quality against saved time where it was measured, and against saved tokens."""
    rows, task = data.base_rows(), data.task
    savings: dict[str, Callable[[ComparisonRow], float | None]] = {
        "Saved time of prefill (%)": lambda row: (
            (times := row.metric("prefill_speedup")) and 1 - 1 / times
        ),
        "Saved tokens (%)": lambda row: row.metric("token_reduction"),
    }
    panels = []
    for ylabel, level, quality in (
        ("Perplexity, times the base model's", 1.0, _perplexity_ratio),
        ("Accuracy change (points)", 0.0, partial(_accuracy_change, task=task)),
    ):
        for xlabel, saving in savings.items():
            lines = [
                Line(row.label, [(100 * x, value[0])], index, [value[1]], look=APART)
                for index, row in enumerate(rows)
                if (x := saving(row)) is not None and (value := quality(row)) is not None
            ]
            axes = {"xlabel": xlabel, "ylabel": ylabel}
            panels += [Panel(lines, axes=axes, levels=[level])] if lines else []
    if not panels:
        return None
    title = "Quality against what is saved"
    return ReportFigure("saving", title, chart(panels, columns=2), wide=True)


def _perplexity_ratio(row: ComparisonRow) -> tuple[float, float] | None:
    """Return UMIM's perplexity over the base model's, and its standard error if it is known."""
    error = row.errors.get("nats_increase", math.nan)
    return None if row.ppl_ratio is None else (row.ppl_ratio, row.ppl_ratio * error)


def _accuracy_change(row: ComparisonRow, task: str) -> tuple[float, float] | None:
    base, merged = row.score(BASE, task), row.accuracy(row.setting, task)
    if base is None or merged is None or merged["mean"] is None:
        return None
    return 100 * (merged["mean"] - base), 100 * (merged["stderr"] or math.nan)


def _accuracy(data: ReportData) -> ReportFigure | None:
    rows, task = data.base_rows(), data.task
    lines: dict[tuple[object, ...], Line] = {}  # equal points of a base model stand once
    for index, row in enumerate(rows):
        for setting in setting_names():
            if (task, setting) not in row.scores:
                continue
            result = next(iter(row.scores[task, setting].values()))
            point = (100 * (row.score(setting, task, TASK_TR) or 0.0), 100 * result.value)
            error = math.nan if result.stderr is None else 100 * result.stderr
            own = (row.backbone, result.value) if setting == BASE else (index,)
            line = Line(row.label, [point], index, [error], [setting], look=APART)
            lines.setdefault((setting, *own), line)
    if not lines:
        return None
    axes = {"xlabel": "Token reduction on the task (%)", "ylabel": "Accuracy (%)"}
    title = "Task accuracy against token reduction"
    figure = chart([Panel(list(lines.values()), axes=axes)], width=6.3)  # half of the page's width
    return ReportFigure("accuracy", title, figure)


def _losses(curves: Sequence[Report]) -> ReportFigure | None:
    drawn = [curve for curve in curves if curve["train"] or curve["validation"]]
    if not drawn:
        return None
    panels = []
    for curve in drawn:
        axes = {"title": wrapped(curve["label"]), "xlabel": "Step"}
        axes["ylabel"] = _QUANTITIES[curve["quantity"]]
        train, validation = _gapped(curve["train"]), _gapped(curve["validation"])
        lines = [
            Line("training", train, 0, look={"linewidth": 1.1, "marker": "none"}),
            Line("validation", validation, 1, look={"markersize": 3.5}),
        ]
        panels.append(Panel([line for line in lines if line.points], axes=axes))
    return ReportFigure("losses", "Loss curves", chart(panels, height=3.1), len(drawn) > 1)


def _gapped(points: Sequence[tuple[int, float | None]]) -> list[tuple[float, float]]:
    """Return steps and values of a curve, NaN (a gap in the drawing) for a missing value."""
    return [(float(step), math.nan if value is None else value) for step, value in points]


def _speed(rows: Sequence[Report]) -> ReportFigure | None:
    """Draw UMIM's speed over the base model's against the prompt length; the table has the rest."""
    # A request is the sum of the other two; of several batch sizes the first one is drawn.
    drawn = [
        (row["phase"], row["label"], row["prompt_tokens"], ratio)
        for row in rows
        if row["phase"] != "request"
        and row["batch_size"] == rows[0]["batch_size"]
        and (ratio := _times_faster(row)) is not None
    ]
    lengths = sorted({length for _, _, length, _ in drawn})
    if len(lengths) < _FEWEST_LENGTHS:
        return None
    labels, panels = list(dict.fromkeys(label for _, label, _, _ in drawn)), []
    for phase in dict.fromkeys(phase for phase, *_ in drawn):
        lines = []
        for index, label in enumerate(labels):
            points = sorted((float(x), y) for p, name, x, y in drawn if (p, name) == (phase, label))
            lines += [Line(label, points, index)] if points else []
        axes = {
            "title": phase,
            "xlabel": "Prompt length (raw tokens)",
            "ylabel": "Speed, UMIM / base",
            "xscale": "log",
            "xticks": lengths,
            "xticklabels": [f"{value:,}" for value in lengths],
        }
        panels.append(Panel(lines, axes=axes, levels=[1.0]))
    title = "Speed against the base model"
    return ReportFigure("speed", title, chart(panels), len(panels) > 1)


def _times_faster(row: Report) -> float | None:
    """Return UMIM's speed over the base model's, or None where one is missing."""
    base, ours = row["base_tokens_per_s"], row["umim_tokens_per_s"]
    return ours / base if base and ours is not None else None


_STEPS: Final = {
    "raw": "reach the threshold",
    "overlap": "after the overlap filter",
    "rules": "rules",
}
_ALIGNED: Final = ("top1", "top3", "top10", "topp", "mrr", "kl", "top1_states", "kl_states")


def write_report(out: Path, data: ReportData) -> None:
    write_bytes(out / "report.html", html("report.html", _values(data)).encode())
    write_json(out / "report.json", json.loads(data.model_dump_json()))


def _values(data: ReportData) -> Report:
    usages = [after_training(place["path"]) for place in data.checkpoints]
    places = [
        {**place, "commands": [line.strip() for line in lines if line.startswith(" ")]}
        for place, lines in zip(data.checkpoints, usages, strict=True)
    ]
    compared = {"summary": summary, "comparison": comparison} if data.rows else {}
    tables = {name: make(data.rows, data.config) for name, make in compared.items()}
    config = json.dumps(data.config, indent=2, ensure_ascii=False, default=str)
    return {
        "title": f"UMIM report: {data.recipe}",
        "leading": leading(data),
        "data": data,
        "figures": draw_figures(data),
        "comparison": "",
        **{name: markdown_html(table_markdown(table)) for name, table in tables.items()},
        "places": places,
        "notes": [line for lines in usages[:1] for line in lines if not line.startswith(" ")],
        "tables": markdown_html(report_tables(data)),
        "config": config if data.config else "",
    }


def report_tables(data: ReportData) -> str:
    """Return the smaller tables that the data has rows for, in Markdown."""
    scores = [
        {"row": row, "task": task, "setting": setting}
        for row in data.base_rows()
        for task, setting in row.scores
    ]
    tasks = list(dict.fromkeys(task for row in data.rows for task in row.tasks))
    prefix = "ppl_umim_ood_"
    corpora = sorted({m.removeprefix(prefix) for r in data.rows for m in r.metrics if prefix in m})
    values = {
        "data": data,
        "scores": scores,
        "tasks": tasks,
        "states": STATES,
        "aligned": [r for r in data.rows if any(r.metric(n) is not None for n in _ALIGNED)],
        "perplexities": [r for r in data.rows if any(n.startswith("ppl_") for n in r.metrics)],
        "texts": {"in-domain": ""} | {corpus: f"_ood_{corpus}" for corpus in corpora},
        "speeds": [row | {"ratio": _times_faster(row)} for row in data.throughput],
        "parts": [{"row": row, "part": part} for row in data.rows for part in row.parts],
        "rule_steps": [
            {"label": counts["label"], "step": words, "counts": counts[step]}
            for counts in data.rule_counts
            for step, words in _STEPS.items()
            if counts[step]
        ],
        "orders": sorted({n for counts in data.rule_counts for n in counts["rules"]}, key=int),
    }
    return page("report_tables.md", values)


def leading(data: ReportData) -> tuple[ComparisonRow, str] | None:
    """Return the row whose figures lead the page, and which one it is and why, None without any.

    It is the row that the recipe features, or else the one that agrees most with its base model
    before adaptation.
    """
    own = data.base_rows()
    if not own:
        return None
    row, why = max(own, key=agreement), ""
    if data.config.get("headline") is not None and data.rows[0].source == "shipped":
        row, why = data.rows[0], ": featured by the recipe"
    elif len(own) > 1:
        why = f": highest Top-1 of {len(own)} checkpoints in setting {WT}"
    return row, f"{row.label}, {row.setting}{why}"


def agreement(row: ComparisonRow) -> float:
    """Return a row's Top-1 at every state that decoding passes through, or else at unit ends."""
    values = (row.metric("top1_states"), row.metric("top1"))
    return next((value for value in values if value is not None), -1.0)
