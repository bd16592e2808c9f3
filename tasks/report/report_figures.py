"""Figures of the report: accuracy, perplexity, alignment, losses, speed, attention, similarity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import matplotlib
from matplotlib.figure import Figure

from tasks.report.comparison import TASK_TR, ComparisonRow
from tasks.report.report_data import (
    AttentionExample,
    LossCurve,
    ReportData,
    SimilarityRow,
    SpeedRow,
)
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
    wrapped_label,
)
from tasks.report.row_labels import shown_name
from umim_core.adaptation.settings import BASE
from umim_core.config.recipe import DEFAULT_TASK

_LABEL_CHARACTERS: Final = 14
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
        drawn += [_attention(data.attention), _similarity(data.similarity)]
    return [figure for figure in drawn if figure is not None]


def _accuracy(data: ReportData) -> ReportFigure | None:
    task = next((row.tasks[0] for row in data.base_rows() if row.tasks), DEFAULT_TASK)
    rows = [row for row in data.base_rows() if row.settings_scored(task)]
    if not rows:
        return None
    figure = Figure(figsize=(6.4, 4.4))
    axes = figure.add_subplot()
    based: set[tuple[str, float]] = set()
    things = []
    for index, row in enumerate(rows):
        for setting, score in row.settings_scored(task).items():
            result, name = next(iter(score.values())), setting
            if setting == BASE:
                place = (row.cell.backbone, result.value)
                if place in based:
                    continue
                based.add(place)
                name = f"{shown_name(row.cell.backbone)}, {BASE}"
            x = 100 * (row.score(setting, task, TASK_TR) or 0.0)
            errors = [100 * result.stderr] if result.stderr else []
            things.append(Marks(index, [(x, 100 * result.value)], [name], errors=errors))
    draw_marks(axes, things)
    axes.set(xlabel="Token reduction on the task (%)", ylabel="Accuracy (%)")
    axes.margins(x=0.12, y=0.12)
    legend(figure, [(r.label, i) for i, r in enumerate(rows)])
    label_marks(axes, things)
    caption = "Each point is one way of using the rules; bars are one standard error."
    if (chance := data.chance_of(task)) is not None:
        caption += f" Guessing gives {100 * chance:.0f} %."
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
        name = row.brief.removeprefix(shown_name(backbone)).strip(", ") or "rules"
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
    axes.set_yticks(range(len(rows)), [wrapped_label(row.label) for row in rows])
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


def _attention(example: AttentionExample | None) -> ReportFigure | None:
    """Draw attention before and after merging side by side, on one scale; nothing for None."""
    if example is None or not example.units:
        return None
    size = len(example.units)
    figure = Figure(figsize=(12.6, 2.6 + 0.16 * size))
    panels = figure.subplots(1, 2, sharey=True)
    highest = max(max(max(row) for row in grid) for grid in (example.before, example.after))
    names = [_name(*unit) for unit in zip(example.units, example.tokens, strict=True)]
    places = [place + 0.5 for place in range(size)]
    grids = (
        ("before: raw tokens, added up by unit", example.before),
        ("after: units", example.after),
    )
    for axes, (title, grid) in zip(panels, grids, strict=True):
        # Squares and no image: a picture inside SVG would not follow the page's size.
        mesh = axes.pcolormesh(grid, cmap="Blues", vmin=0, vmax=highest, edgecolors="none")
        axes.set_xticks(places, names, rotation=90, fontsize=7.5)
        axes.set_yticks(places, names, fontsize=7.5)
        for label, tokens in zip(axes.get_xticklabels(), example.tokens, strict=True):
            label.set_color(PALETTE[1] if tokens > 1 else label.get_color())
        axes.set(ylim=(size, 0), title=title, xlabel="Attended unit")
        axes.grid(visible=False)
    panels[0].set_ylabel("Attending unit")
    figure.colorbar(mesh, ax=panels, label="Attention weight", shrink=0.8)
    caption = (
        f"{example.label}. Orange: merged spans. The row of a span is that of its last token; each "
        "row adds up to 1. A column that stays dark after merging is a surrogate that later units "
        "go on attending to."
    )
    return finish(figure, "attention", "Attention before and after merging", caption, wide=True)


def _similarity(rows: Sequence[SimilarityRow]) -> ReportFigure | None:
    """Draw the cosine of surrogates with their tokens, their mean and a random token, by order."""
    if not rows:
        return None
    figure = Figure(figsize=(6.4, 4.4))
    axes = figure.add_subplot()
    places, names, start = [], [], 0.0
    for row in rows:
        bars = [(f"{place}", value, 0) for place, value in enumerate(row.by_offset, 1)]
        bars += [("mean", row.mean, 1), ("random", row.random, 2)]
        for offset, (name, value, colour) in enumerate(bars):
            axes.bar(start + offset, value, 0.8, color=PALETTE[colour])
            places.append(start + offset)
            names.append(name)
        top = {"xycoords": ("data", "axes fraction"), "fontsize": 8.5, "va": "top"}
        axes.annotate(f"{row.order} tokens ({row.spans:,})", (start, 1.0), **top)
        start += len(bars) + 1
    axes.set_xticks(places, names, rotation=90)
    axes.set_ylabel("Cosine similarity")
    axes.axhline(0.0, color=PALETTE[0], linewidth=0.8)
    axes.margins(y=0.15)
    axes.grid(visible=False, axis="x")
    entries = [("token at that place", 0), ("mean of the span", 1), ("random token", 2)]
    legend(figure, entries, lines=True)
    caption = (
        "Mean cosine of a surrogate with the embeddings of its own tokens (spans of the text)."
    )
    return finish(figure, "similarity", "Surrogates against their tokens", caption)


def _name(text: str, tokens: int) -> str:
    """Return a unit's label: short, on one line, its raw tokens behind it; ``$`` is no formula."""
    shown = " ".join(text.split()) or "␣"
    if len(shown) > _LABEL_CHARACTERS:
        shown = shown[: _LABEL_CHARACTERS - 1] + "…"
    return shown.replace("$", r"\$") + (f" ({tokens})" if tokens > 1 else "")
