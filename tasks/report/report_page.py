"""Report of a pipeline run: one offline HTML page, the same as Markdown, JSON.

``ReportData`` in, files out: nothing is measured, fetched or timed here, so equal data makes equal
bytes. The page makes no request; its one script sorts and filters tables. It follows the reader's
light or dark.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from markupsafe import Markup
from matplotlib.figure import Figure

from tasks.report.charts import Line, Panel, chart, heatmaps, svg, svg_file, wrapped
from tasks.report.comparison import TASK_TR, ComparisonRow, shown_name
from tasks.report.comparison_table import STATES, comparison, with_error
from tasks.report.render import (
    DASH,
    Report,
    environment,
    html,
    markdown_html,
    page,
    shown,
    table_markdown,
)
from tasks.report.report_data import (
    AttentionExample,
    LossCurve,
    ReportData,
    SimilarityRow,
    SpeedRow,
)
from umim_core.adaptation.settings import BASE, WT
from umim_core.checkpoint.next_steps import after_training
from umim_core.config.recipe import DEFAULT_TASK
from umim_core.store.artifacts import write_json
from umim_core.store.disk import write_bytes

ATTENTION: Final = "Attention before and after merging"
FIRST: Final = "saving"  # the figure that leads the report
_LABEL_CHARACTERS: Final = 14
_FEWEST_LENGTHS: Final = 3  # a line through two points shows nothing that the table does not
_QUANTITIES: Final = {
    "preference": "Preference loss",
    "KL": "KL (nats per row)",
    "cross-entropy": "Cross-entropy (nats per row)",
}


@dataclass(frozen=True)
class ReportFigure:
    """A drawn figure."""

    name: str
    title: str
    caption: str
    figure: Figure
    wide: bool = False

    @property
    def svg(self) -> Markup:
        """The drawing as the HTML page holds it."""
        return Markup(svg(self.figure, self.name, self.title))  # noqa: S704  # our own drawing


def draw_figures(data: ReportData) -> list[ReportFigure]:
    """Draw every figure that the data has points for."""
    drawn = (
        *(_saving(data), _accuracy(data), _perplexity(data), _alignment(data)),
        *(_losses(data.curves), _speed(data.throughput)),
        *(_attention(data.attention), _similarity(data.similarity)),
    )
    return [figure for figure in drawn if figure is not None]


def _saving(data: ReportData) -> ReportFigure | None:
    """Draw quality against saved time where it was measured, and against saved tokens."""
    rows = data.base_rows()
    task = next((row.tasks[0] for row in rows if row.tasks), DEFAULT_TASK)
    savings = {"Saved time of prefill (%)": _saved_time, "Saved tokens (%)": _saved_tokens}
    qualities = {
        "Perplexity, times the base model's": _perplexity_ratio,
        "Accuracy change (points)": lambda row: _accuracy_change(row, task),
    }
    panels = []
    for ylabel, quality in qualities.items():
        for xlabel, saving in savings.items():
            lines = [
                Line(row.label, [(x, value[0])], index, [value[1]], joined=False)
                for index, row in enumerate(rows)
                if (x := saving(row)) is not None and (value := quality(row)) is not None
            ]
            level = 0.0 if ylabel.startswith("Accuracy") else 1.0
            axes = {"xlabel": xlabel, "ylabel": ylabel}
            panels += [Panel(lines, axes=axes, levels=[(level, None)])] if lines else []
    if not panels:
        return None
    caption = (
        "Dotted: the base model. Lower perplexity and higher accuracy are better, and so is more "
        "to the right. Perplexity is that of held-out text. Bars are one standard error."
    )
    figure = chart(panels, columns=2)
    return ReportFigure(FIRST, "Quality against what is saved", caption, figure, wide=True)


def _saved_time(row: ComparisonRow) -> float | None:
    speedup = row.metric("prefill_speedup")
    return 100 * (1 - 1 / speedup) if speedup else None


def _saved_tokens(row: ComparisonRow) -> float | None:
    reduction = row.metric("token_reduction")
    return None if reduction is None else 100 * reduction


def _perplexity_ratio(row: ComparisonRow) -> tuple[float, float] | None:
    """Return UMIM's perplexity over the base model's, and its standard error if it is known."""
    base, ours = row.metric("ppl_base"), row.metric("ppl_umim")
    if not base or not ours:
        return None
    error = row.errors.get("nats_increase")
    return ours / base, math.nan if error is None else ours / base * error


def _accuracy_change(row: ComparisonRow, task: str) -> tuple[float, float] | None:
    base, own = row.score(BASE, task), row.score(row.setting, task)
    if base is None or own is None:
        return None
    error = next(iter(row.scores[task, row.setting].values())).stderr
    return 100 * (own - base), math.nan if error is None else 100 * error


def _accuracy(data: ReportData) -> ReportFigure | None:
    task = next((row.tasks[0] for row in data.base_rows() if row.tasks), DEFAULT_TASK)
    rows = [row for row in data.base_rows() if row.settings_scored(task)]
    if not rows:
        return None
    lines: list[Line] = []
    based: set[tuple[str, float]] = set()
    for index, row in enumerate(rows):
        for setting, score in row.settings_scored(task).items():
            result = next(iter(score.values()))
            if setting == BASE:
                place = (row.cell.backbone, result.value)
                if place in based:
                    continue
                based.add(place)
            point = (100 * (row.score(setting, task, TASK_TR) or 0.0), 100 * result.value)
            error = math.nan if result.stderr is None else 100 * result.stderr
            lines.append(Line(row.label, [point], index, [error], [setting], joined=False))
    axes = {"xlabel": "Token reduction on the task (%)", "ylabel": "Accuracy (%)"}
    caption = "Each point is one way of using the rules; bars are one standard error."
    if (chance := data.chance_of(task)) is not None:
        caption += f" Guessing gives {100 * chance:.0f} %."
    title = "Task accuracy against token reduction"
    return ReportFigure("accuracy", title, caption, chart([Panel(lines, axes=axes)]))


def _perplexity(data: ReportData) -> ReportFigure | None:
    rows = [r for r in data.base_rows() if r.metric("ppl_umim") and r.metric("token_reduction")]
    if not rows:
        return None
    backbones = list(dict.fromkeys(row.cell.backbone for row in rows))
    bases = {r.cell.backbone: base for r in reversed(rows) if (base := r.metric("ppl_base"))}
    lines = []
    for row in rows:
        backbone = row.cell.backbone
        name = row.brief.removeprefix(shown_name(backbone)).strip(", ") or "rules"
        place = (100 * (row.metric("token_reduction") or 0.0), row.metric("ppl_umim") or math.nan)
        how: dict[str, Any] = {"joined": False, "hollow": row.source == "shipped"}
        index = backbones.index(backbone)
        lines.append(Line(shown_name(backbone), [place], index, texts=[name], **how))
    levels = [(base, backbones.index(backbone)) for backbone, base in bases.items()]
    axes = {"xlabel": "Token reduction, in-domain test text (%)"}
    axes["ylabel"] = "Perplexity per raw token"
    caption = "Lower is better. Dotted: the base model without merging. Hollow: shipped checkpoint."
    title = "Perplexity against token reduction"
    figure = chart([Panel(lines, axes=axes, levels=levels)])
    return ReportFigure("perplexity", title, caption, figure)


def _alignment(data: ReportData) -> ReportFigure | None:
    names = {"top1": "Top-1 agreement", "top3": "Top-3 overlap", "mrr": "MRR"}
    rows = [r for r in data.base_rows() if any(r.metric(m) is not None for m in names)]
    if not rows:
        return None
    rows = sorted(rows, key=lambda r: (r.cell.backbone, r.source == "shipped", r.tau or 0, r.label))
    lines = [
        Line(label, points, index, joined=False)
        for index, (metric, label) in enumerate(names.items())
        if (points := [(x, y) for y, r in enumerate(rows) if (x := r.metric(metric)) is not None])
    ]
    axes = {
        "yticks": range(len(rows)),
        "yticklabels": [wrapped(row.label) for row in rows],
        "xlim": (0, 1),
        "ylim": (len(rows) - 0.5, -0.5),
        "xlabel": "Agreement with the base model on the same rows (0 to 1)",
    }
    caption = "How often the merged model predicts what the base model predicts, by threshold τ."
    figure = chart([Panel(lines, axes=axes)], height=1.1 + 0.36 * len(rows))
    return ReportFigure("alignment", "Alignment by threshold", caption, figure)


def _losses(curves: Sequence[LossCurve]) -> ReportFigure | None:
    drawn = [curve for curve in curves if curve.train or curve.validation]
    if not drawn:
        return None
    panels = []
    for curve in drawn:
        axes = {"title": wrapped(curve.label), "xlabel": "Step"}
        axes["ylabel"] = _QUANTITIES[curve.quantity]
        lines = [
            Line("training", list(_gapped(curve.train)), 0, marked=False, look={"linewidth": 1.1}),
            Line("validation", list(_gapped(curve.validation)), 1, look={"markersize": 3.5}),
        ]
        panels.append(Panel([line for line in lines if line.points], axes=axes))
    caption = "Losses while the merge module is trained; the backbone stays frozen."
    if any(curve.quantity != "preference" for curve in drawn):
        caption += (
            " A training point is one batch, before its step, of the text that the rules were "
            "mined on: rules match more often there than in the validation text, more is merged, "
            "and the loss of the same module is usually higher. Compare each curve with itself."
        )
    wide = len(drawn) > 1
    return ReportFigure("losses", "Loss curves", caption, chart(panels, height=3.1), wide)


def _gapped(points: Sequence[tuple[int, float | None]]) -> Iterator[tuple[float, float]]:
    """Yield steps and values of a curve, NaN (a gap in the drawing) for a missing value."""
    for step, value in points:
        yield float(step), math.nan if value is None else value


def _speed(rows: Sequence[SpeedRow]) -> ReportFigure | None:
    """Draw UMIM's speed over the base model's against the prompt length; the table has the rest."""
    # A request is the sum of the other two; of several batch sizes the first one is drawn.
    rows = [row for row in rows if row.phase != "request" and row.batch_size == rows[0].batch_size]
    rows = [row for row in rows if row.ratio is not None]
    lengths = sorted({row.prompt_tokens for row in rows})
    if len(lengths) < _FEWEST_LENGTHS:
        return None
    labels = list(dict.fromkeys(row.label for row in rows))
    panels = []
    for phase in dict.fromkeys(row.phase for row in rows):
        lines = []
        for index, label in enumerate(labels):
            own = [row for row in rows if (row.label, row.phase) == (label, phase)]
            points = sorted((float(r.prompt_tokens), r.ratio) for r in own if r.ratio is not None)
            lines += [Line(label, points, index)] if points else []
        axes = {
            "title": phase,
            "xlabel": "Prompt length (raw tokens)",
            "ylabel": "Speed, UMIM / base",
            "xscale": "log",
            "xticks": lengths,
            "xticklabels": [f"{value:,}" for value in lengths],
        }
        panels.append(Panel(lines, axes=axes, levels=[(1.0, None)]))
    caption = (
        "Measured on this machine, matching and merging included; above the dotted line UMIM is "
        "faster. Tokens per second are in the table."
    )
    figure, wide = chart(panels), len(panels) > 1
    return ReportFigure("speed", "Speed against the base model", caption, figure, wide)


def _attention(example: AttentionExample | None) -> ReportFigure | None:
    """Draw attention before and after merging side by side, on one scale; nothing for None."""
    if example is None or not example.units:
        return None
    caption = (
        f"{example.label}. Orange: merged spans. The row of a span is that of its last token; each "
        "row adds up to 1. A column that stays dark after merging is a surrogate that later units "
        "go on attending to."
    )
    return ReportFigure("attention", ATTENTION, caption, attention_figure(example), True)


def attention_figure(example: AttentionExample) -> Figure:
    """Draw attention over raw tokens and over units side by side, on one scale."""
    names = [_unit_name(*unit) for unit in zip(example.units, example.tokens, strict=True)]
    grids = {
        "before: raw tokens, added up by unit": example.before,
        "after: units": example.after,
    }
    merged = [place for place, tokens in enumerate(example.tokens) if tokens > 1]
    return heatmaps(grids, names, merged, ("Attended unit", "Attending unit", "Attention weight"))


def _similarity(rows: Sequence[SimilarityRow]) -> ReportFigure | None:
    """Draw the cosine of surrogates with their tokens, their mean and a random token, by order."""
    if not rows:
        return None
    bars = {
        f"{row.order} tokens\n({row.spans:,} spans)": {
            f"token {place}": value for place, value in enumerate(row.by_offset, 1)
        }
        | {"mean of the span": row.mean, "random token": row.random}
        for row in rows
    }
    caption = (
        "Mean cosine of a surrogate with the embeddings of its own tokens (spans of the text)."
    )
    panel = Panel(bars=bars, axes={"ylabel": "Cosine similarity"})
    return ReportFigure(
        "similarity", "Surrogates against their tokens", caption, chart([panel]), False
    )


def _unit_name(text: str, tokens: int) -> str:
    """Return a unit's label: short, on one line, its raw tokens behind it; ``$`` is no formula."""
    shown = " ".join(text.split()) or "␣"
    if len(shown) > _LABEL_CHARACTERS:
        shown = shown[: _LABEL_CHARACTERS - 1] + "…"
    return shown.replace("$", r"\$") + (f" ({tokens})" if tokens > 1 else "")


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
    parts = {name: markdown_html(values[name]) for name in ("comparison", "tables")}
    own = {"title": f"UMIM report: {data.recipe}", "cards": cards(data)}
    write_bytes(out / "report.html", html("report.html", values | parts | own).encode())
    markdown = environment().get_template("report.md").render(values).strip() + "\n"
    write_bytes(out / "report.md", markdown.encode())
    write_json(out / "report.json", json.loads(data.model_dump_json()))


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
        "orders": sorted({n for counts in data.rule_counts for n in counts.rules}),
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
