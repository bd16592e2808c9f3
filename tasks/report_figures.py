"""Draw the report's figures as SVG that takes its text colour from the page.

Text and axes are drawn in marker colours that are replaced by ``currentColor`` and CSS variables,
so that one drawing serves light and dark pages. The same data gives the same bytes.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tasks.comparison import SETTINGS, ComparisonRow
from tasks.report import LossCurve, Point, ReportData, ThroughputRow

# Distinguishable with the common colour deficiencies, readable on white and on near-black.
PALETTE: Final = ("#3b7dd8", "#d9822b", "#2a9d78", "#9b6bc9", "#d2504a", "#8a8f3c", "#4aa3b5")
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")
_INK: Final = "#010203"
_GRID: Final = "#040506"
_STYLE: Final = {
    "svg.fonttype": "none",
    "svg.hashsalt": "umim",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "axes.titlesize": 10,
    "axes.titlecolor": _INK,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "figure.constrained_layout.use": True,
}


@dataclass(frozen=True)
class ReportFigure:
    """A drawn figure.

    Attributes:
        name: File stem and anchor.
        title: What it shows, in plain words.
        caption: How to read it.
        svg: One ``<svg>`` element.
        wide: Whether it takes the full width of the page.
    """

    name: str
    title: str
    caption: str
    svg: str
    wide: bool = False


def draw_figures(data: ReportData) -> list[ReportFigure]:
    """Draw every figure that the data has points for."""
    with matplotlib.rc_context(_STYLE):
        drawn = [_accuracy(data), _perplexity(data), _alignment(data)]
        drawn += [_losses(data.curves), _throughput(data.throughput)]
    return [figure for figure in drawn if figure is not None]


def standalone(figure: ReportFigure) -> str:
    """Return a figure as a file of its own, on white."""
    start = figure.svg.index(">") + 1
    white = '<rect width="100%" height="100%" fill="#fff"/>'
    return figure.svg[:start] + white + figure.svg[start:] + "\n"


def _accuracy(data: ReportData) -> ReportFigure | None:
    rows = [row for row in data.rows if row.accuracies]
    if not rows:
        return None
    figure = Figure(figsize=(6.4, 4.0))
    axes = figure.add_subplot()
    labels: list[tuple[float, float, str, str]] = []
    for index, row in enumerate(rows):
        colour = PALETTE[index % len(PALETTE)]
        order = sorted(row.accuracies, key=lambda s: (SETTINGS.index(s) if s in SETTINGS else 99, s))
        for setting in order:
            result = row.accuracies[setting]
            x, y = 100 * result.token_reduction, 100 * result.value
            axes.errorbar(
                [x],
                [y],
                yerr=None if result.stderr is None else [100 * result.stderr],
                fmt=_MARKERS[index % len(_MARKERS)],
                color=colour,
                markersize=6,
                elinewidth=1,
                capsize=2,
            )
            labels.append((x, y, setting, colour))
    if data.chance is not None:
        axes.axhline(100 * data.chance, color=_INK, linewidth=1, linestyle=":")
        axes.annotate(
            "guessing",
            (0.0, 100 * data.chance),
            xycoords=("axes fraction", "data"),
            xytext=(4, 3),
            textcoords="offset points",
            fontsize=8.5,
        )
    axes.set_xlabel("Token reduction on the task (%)")
    axes.set_ylabel("Accuracy (%)")
    axes.margins(x=0.12, y=0.15)
    _label_points(axes, labels)
    _keys(figure, [(r.label, i) for i, r in enumerate(rows)])
    caption = "Each point is one way of using the rules; bars are one standard error."
    return _finish(figure, "accuracy", "Task accuracy against token reduction", caption)


def _perplexity(data: ReportData) -> ReportFigure | None:
    rows = [r for r in data.rows if r.metric("ppl_umim") and r.metric("token_reduction")]
    if not rows:
        return None
    figure = Figure(figsize=(6.4, 4.0))
    axes = figure.add_subplot()
    backbones = list(dict.fromkeys(row.backbone for row in rows))
    labels: list[tuple[float, float, str, str]] = []
    for row in rows:
        index = backbones.index(row.backbone)
        colour = PALETTE[index % len(PALETTE)]
        x = 100 * (row.metric("token_reduction") or 0.0)
        y = row.metric("ppl_umim") or math.nan
        shipped = row.source == "shipped"
        axes.plot(
            [x],
            [y],
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=7,
            color=colour,
            linestyle="none",
            markerfacecolor="none" if shipped else colour,
        )
        labels.append((x, y, row.label.removeprefix(row.backbone).strip(", ") or "rules", colour))
    for index, backbone in enumerate(backbones):
        base = next((r.metric("ppl_base") for r in rows if r.backbone == backbone), None)
        if base is not None:
            axes.axhline(base, color=PALETTE[index % len(PALETTE)], linewidth=1.2, linestyle="--")
    axes.set_xlabel("Token reduction, in-domain test text (%)")
    axes.set_ylabel("Perplexity per raw token")
    axes.margins(x=0.18, y=0.15)
    _label_points(axes, labels)
    _keys(figure, [(name, index) for index, name in enumerate(backbones)])
    caption = "Lower is better. Dashed: the base model without merging. Hollow: shipped checkpoint."
    return _finish(figure, "perplexity", "Perplexity against token reduction", caption)


def _alignment(data: ReportData) -> ReportFigure | None:
    names = (("Top-1 agreement", "top1"), ("Top-3 overlap", "top3"), ("MRR", "mrr"))
    rows = [r for r in data.rows if any(r.metric(metric) is not None for _, metric in names)]
    if not rows:
        return None
    rows = sorted(rows, key=lambda r: (r.backbone, r.source == "shipped", r.tau or 0, r.label))
    figure = Figure(figsize=(6.4, 1.3 + 0.42 * len(rows)))
    axes = figure.add_subplot()
    for index, (_, metric) in enumerate(names):
        axes.plot(
            [_or_nan(row.metric(metric)) for row in rows],
            range(len(rows)),
            linestyle="none",
            marker=_MARKERS[index],
            markersize=7,
            color=PALETTE[index],
        )
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.set_xlabel("Agreement with the base model on the same rows (0 to 1)")
    _keys(figure, [(label, index) for index, (label, _) in enumerate(names)])
    caption = "How often the merged model predicts what the base model predicts, by threshold τ."
    return _finish(figure, "alignment", "Alignment by threshold", caption, wide=len(rows) > 8)


def _losses(curves: Sequence[LossCurve]) -> ReportFigure | None:
    shown = [c for c in curves if c.train or c.validation]
    if not shown:
        return None
    columns = min(3, len(shown))
    count = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(3.9 * columns if columns > 1 else 6.4, 2.9 * count + 0.3))
    for index, curve in enumerate(shown):
        axes = figure.add_subplot(count, columns, index + 1)
        steps, values = _split(curve.train)
        axes.plot(steps, values, color=PALETTE[0], linewidth=1.1, alpha=0.85)
        steps, values = _split(curve.validation)
        axes.plot(steps, values, color=PALETTE[1], marker="o", markersize=3.5)
        axes.set_title(curve.label)
        axes.set_xlabel("Step")
        unit = "" if curve.quantity == "preference" else " (nats per row)"
        name = {"preference": "Preference loss", "KL": "KL"}.get(curve.quantity, "Cross-entropy")
        axes.set_ylabel(name + unit)
    _keys(figure, [("training", 0), ("validation", 1)], lines=True)
    caption = "Losses while the merge module is trained; the backbone stays frozen."
    return _finish(figure, "losses", "Loss curves", caption, wide=columns > 1)


def _throughput(rows: Sequence[ThroughputRow]) -> ReportFigure | None:
    panels = list(dict.fromkeys((row.label, row.phase) for row in rows))
    if not panels:
        return None
    columns = min(3, len(panels))
    count = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(3.9 * columns if columns > 1 else 6.4, 2.9 * count + 0.3))
    for index, (label, phase) in enumerate(panels):
        axes = figure.add_subplot(count, columns, index + 1)
        own = sorted(
            (r for r in rows if (r.label, r.phase) == (label, phase)), key=lambda r: r.prompt_tokens
        )
        x = [row.prompt_tokens for row in own]
        axes.plot(x, [_or_nan(r.base_tokens_per_s) for r in own], color=PALETTE[0], marker="o")
        axes.plot(x, [_or_nan(r.umim_tokens_per_s) for r in own], color=PALETTE[1], marker="s")
        for row in own:
            if row.ratio is not None:
                top = max(row.base_tokens_per_s or 0.0, row.umim_tokens_per_s or 0.0)
                axes.annotate(
                    f"{row.ratio:.2f}×",
                    (row.prompt_tokens, top),
                    xytext=(0, 7),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8.5,
                )
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [f"{value:,}" for value in x])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.margins(x=0.12)
        axes.set_ylim(top=axes.get_ylim()[1] * 1.12)
        axes.set_title(f"{label}: {phase}")
        axes.set_xlabel("Prompt length (raw tokens)")
        axes.set_ylabel("Raw tokens per second")
    _keys(figure, [("base model", 0), ("UMIM", 1)], lines=True)
    caption = "Measured on this machine, matching and merging included; × is UMIM over base."
    return _finish(figure, "throughput", "Throughput", caption, wide=columns > 1)


def _label_points(axes: Axes, labels: Iterable[tuple[float, float, str, str]]) -> None:
    """Write a label beside each point, pushing labels apart where points lie close together."""
    low, high = axes.get_ylim()
    left, right = axes.get_xlim()
    gap, near = (high - low) * 0.062, (right - left) * 0.30
    placed: list[tuple[float, float]] = []
    for x, y, text, colour in sorted(labels, key=lambda entry: (entry[1], entry[0])):
        beside = x > left + 0.62 * (right - left)
        at = y
        for other_x, other_y in sorted(placed, key=lambda entry: entry[1]):
            if abs(other_x - x) < near and abs(at - other_y) < gap:
                at = other_y + gap
        placed.append((x, at))
        axes.annotate(
            text,
            (x, y),
            xytext=(x + (-1 if beside else 1) * (right - left) * 0.025, at),
            ha="right" if beside else "left",
            va="center",
            fontsize=8.5,
            color=colour,
            arrowprops=None
            if abs(at - y) < gap / 2
            else {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 0},
        )
    axes.set_xlim(left, right)
    axes.set_ylim(low, max([high, *(y + gap for _, y in placed)]))


def _keys(figure: Figure, entries: Sequence[tuple[str, int]], *, lines: bool = False) -> None:
    """Put the legend above the drawing area, never over data."""
    handles = [
        matplotlib.lines.Line2D(
            [],
            [],
            color=PALETTE[index % len(PALETTE)],
            marker=None if lines else _MARKERS[index % len(_MARKERS)],
            linestyle="-" if lines else "none",
            markersize=7,
        )
        for _, index in entries
    ]
    longest = max(len(label) for label, _ in entries)
    columns = max(1, int(figure.get_figwidth() * 11 / (longest + 6)))
    figure.legend(
        handles, [label for label, _ in entries], loc="outside upper left", ncols=columns
    )


def _split(points: Sequence[Point]) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [_or_nan(value) for _, value in points]


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _finish(
    figure: Figure, name: str, title: str, caption: str, *, wide: bool = False
) -> ReportFigure:
    buffer = io.StringIO()
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = svg.replace(_INK, "currentColor").replace(_GRID, "var(--grid, #d5d8dd)")
    svg = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font: \1px system-ui, sans-serif", svg)
    svg = re.sub(r'id="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{name}-", svg)
    label = f'<svg role="img" aria-label="{title}"'
    return ReportFigure(name, title, caption, svg.replace("<svg", label, 1), wide)
