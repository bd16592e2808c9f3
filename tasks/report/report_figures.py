"""The report's figures: accuracy, perplexity, alignment, losses, speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import matplotlib
from matplotlib.figure import Figure

from tasks.report.comparison import TASK_TR, ComparisonRow
from tasks.report.report_attention import draw_attention, draw_similarity
from tasks.report.report_data import LossCurve, ReportData, SpeedRow
from tasks.report.report_drawing import (
    INK,
    PALETTE,
    STYLE,
    Marks,
    ReportFigure,
    draw_marks,
    finish,
    label_marks,
    legend,
    mark,
)
from tasks.report.row_labels import shown_name
from umim_core.adaptation.settings import BASE
from umim_core.config.recipe import DEFAULT_TASK

_FEWEST_LENGTHS: Final = 3  # a line through two points shows nothing that the table does not
_QUANTITIES: Final = {
    "preference": "Preference loss",
    "KL": "KL (nats per row)",
    "cross-entropy": "Cross-entropy (nats per row)",
}


def draw_figures(data: ReportData) -> list[ReportFigure]:
    """Draw every figure that the data has points for."""
    with matplotlib.rc_context(STYLE):
        drawn = [_accuracy(data), _perplexity(data)]
        alone = None not in drawn  # both pair up, so that the next one has a line of its own
        drawn += [_alignment(data, wide=alone), _losses(data.curves), _speed(data.throughput)]
        drawn += [draw_attention(data.attention), draw_similarity(data.similarity)]
    return [figure for figure in drawn if figure is not None]


def _accuracy(data: ReportData) -> ReportFigure | None:
    rows = [row for row in data.base_rows() if row.settings_scored(DEFAULT_TASK)]
    if not rows:
        return None
    figure = Figure(figsize=(6.4, 4.4))
    axes = figure.add_subplot()
    based: set[tuple[str, float]] = set()
    things = []
    for index, row in enumerate(rows):
        for setting, score in row.settings_scored(DEFAULT_TASK).items():
            result, name = next(iter(score.values())), setting
            if setting == BASE:
                place = (row.cell.backbone, result.value)
                if place in based:
                    continue
                based.add(place)
                name = f"{shown_name(row.cell.backbone)}, {BASE}"
            x = 100 * (row.score(setting, DEFAULT_TASK, TASK_TR) or 0.0)
            error = 100 * (result.stderr or 0.0)
            things.append(Marks(index, [(x, 100 * result.value)], [name], error=error))
    draw_marks(axes, things)
    axes.set(xlabel="Token reduction on the task (%)", ylabel="Accuracy (%)")
    axes.margins(x=0.12, y=0.12)
    legend(figure, [(r.label, i) for i, r in enumerate(rows)])
    label_marks(axes, things)
    caption = "Each point is one way of using the rules; bars are one standard error."
    if data.chance is not None:
        caption += f" Guessing gives {100 * data.chance:.0f} %."
    return finish(figure, "accuracy", "Task accuracy against token reduction", caption)


def _perplexity(data: ReportData) -> ReportFigure | None:
    rows = [r for r in data.base_rows() if r.metric("ppl_umim") and r.metric("token_reduction")]
    if not rows:
        return None
    figure = Figure(figsize=(6.4, 4.4))
    axes = figure.add_subplot()
    backbones = list(dict.fromkeys(row.cell.backbone for row in rows))
    bases = {r.cell.backbone: base for r in reversed(rows) if (base := r.metric("ppl_base"))}

    def point(row: ComparisonRow) -> Marks:
        backbone = row.cell.backbone
        name = row.label.removeprefix(shown_name(backbone)).strip(", ") or "rules"
        place = (100 * (row.metric("token_reduction") or 0.0), row.metric("ppl_umim") or math.nan)
        return Marks(backbones.index(backbone), [place], [name], hollow=row.source == "shipped")

    things = [point(row) for row in rows]
    draw_marks(axes, things)
    for backbone, base in bases.items():
        colour, _ = mark(backbones.index(backbone))
        axes.axhline(base, color=colour, linewidth=1.2, linestyle="--")
    axes.set(xlabel="Token reduction, in-domain test text (%)", ylabel="Perplexity per raw token")
    axes.margins(x=0.18, y=0.15)
    legend(figure, [(shown_name(name), index) for index, name in enumerate(backbones)])
    label_marks(axes, things, list(bases.values()))
    caption = "Lower is better. Dashed: the base model without merging. Hollow: shipped checkpoint."
    return finish(figure, "perplexity", "Perplexity against token reduction", caption)


def _alignment(data: ReportData, *, wide: bool) -> ReportFigure | None:
    names = {"Top-1 agreement": "top1", "Top-3 overlap": "top3", "MRR": "mrr"}
    rows = [r for r in data.base_rows() if any(r.metric(m) is not None for m in names.values())]
    if not rows:
        return None
    rows = sorted(rows, key=lambda r: (r.cell.backbone, r.source == "shipped", r.tau or 0, r.label))
    figure = Figure(figsize=(12.6 if wide else 6.4, 1.3 + 0.36 * len(rows)))
    axes = figure.add_subplot()
    places = [
        [(x, y) for y, row in enumerate(rows) if (x := row.metric(metric)) is not None]
        for metric in names.values()
    ]
    draw_marks(axes, [Marks(index, points) for index, points in enumerate(places) if points])
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.set(xlim=(0, 1), ylim=(len(rows) - 0.5, -0.5))
    axes.set_xlabel("Agreement with the base model on the same rows (0 to 1)")
    legend(figure, [(label, index) for index, label in enumerate(names)])
    caption = "How often the merged model predicts what the base model predicts, by threshold τ."
    return finish(figure, "alignment", "Alignment by threshold", caption, wide=wide)


def _losses(curves: Sequence[LossCurve]) -> ReportFigure | None:
    shown = [c for c in curves if c.train or c.validation]
    if not shown:
        return None
    columns = min(3, len(shown))
    count = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(12.6 if columns > 1 else 6.4, 3.1 * count + 0.3))
    for index, curve in enumerate(shown):
        axes = figure.add_subplot(count, columns, index + 1)
        axes.plot(*_gapped(curve.train), color=PALETTE[0], linewidth=1.1, alpha=0.85)
        axes.plot(*_gapped(curve.validation), color=PALETTE[1], marker="o", markersize=3.5)
        axes.set(title=curve.label, xlabel="Step", ylabel=_QUANTITIES[curve.quantity])
    legend(figure, [("training", 0), ("validation", 1)], lines=True)
    caption = "Losses while the merge module is trained; the backbone stays frozen."
    if any(curve.quantity != "preference" for curve in shown):
        caption += (
            " A training point is one batch, before its step, of the text that the rules were "
            "mined on: rules match more often there than in the validation text, more is merged, "
            "and the loss of the same module is usually higher. Compare each curve with itself."
        )
    return finish(figure, "losses", "Loss curves", caption, wide=columns > 1)


def _gapped(points: Sequence[tuple[int, float | None]]) -> tuple[list[int], list[float]]:
    """Return steps and values of a curve, NaN (a gap in the drawing) for a missing value."""
    return [step for step, _ in points], [math.nan if y is None else y for _, y in points]


def _speed(rows: Sequence[SpeedRow]) -> ReportFigure | None:
    """Draw UMIM's speed over the base model's against the prompt length; the table has the rest."""
    # A request is the sum of the other two; of several batch sizes the first one is drawn.
    rows = [row for row in rows if row.phase != "request" and row.batch_size == rows[0].batch_size]
    rows = [row for row in rows if row.ratio is not None]
    lengths = sorted({row.prompt_tokens for row in rows})
    if len(lengths) < _FEWEST_LENGTHS:
        return None
    phases = list(dict.fromkeys(row.phase for row in rows))
    labels = list(dict.fromkeys(row.label for row in rows))
    figure = Figure(figsize=(6.4 * len(phases), 4.4))
    for number, phase in enumerate(phases):
        axes = figure.add_subplot(1, len(phases), number + 1)
        own = {
            label: sorted(
                (row.prompt_tokens, row.ratio)
                for row in rows
                if (row.label, row.phase) == (label, phase) and row.ratio is not None
            )
            for label in labels
        }
        draw_marks(axes, [Marks(labels.index(n), p, joined=True) for n, p in own.items() if p])
        axes.axhline(1.0, color=INK, linewidth=0.9, linestyle="--")
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{value:,}" for value in lengths])
        axes.minorticks_off()
        axes.set(title=phase, xlabel="Prompt length (raw tokens)", ylabel="Speed, UMIM / base")
    legend(figure, [(label, index) for index, label in enumerate(labels)])
    caption = (
        "Measured on this machine, matching and merging included; above the dashed line UMIM is "
        "faster. Tokens per second are in the table."
    )
    return finish(figure, "speed", "Speed against the base model", caption, wide=len(phases) > 1)
