"""The figures of an ablation: agreement and divergence against token reduction.

One panel per backbone, one line per variant (whatever differs between the cells besides backbone
and threshold), one labelled point per threshold. A variant has one colour and one marker in
all panels.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tasks.report.ablation_data import AblationData
from tasks.report.ablation_page import FIGURES, AblationFigure
from tasks.report.comparison import ComparisonRow
from tasks.report.comparison_table import DASH, variant_columns
from tasks.report.label_placement import place_labels
from tasks.report.report_drawing import ON_PAPER, STYLE, legend, mark, svg_file
from tasks.report.row_labels import shown_name

_DPI: Final = 150
_MOST_COLUMNS: Final = 3


@dataclass(frozen=True)
class Line:
    """One variant on one backbone.

    Attributes:
        x: Token reduction in percent.
        y: The metric.
        texts: Labels of the points.
        colour: Of line and labels.
        marker: Of the points.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    texts: tuple[str, ...]
    colour: str
    marker: str


def figure_svg(data: AblationData, name: str) -> str:
    """Return a figure as an SVG file on white.

    Args:
        data: What to show.
        name: One of ``FIGURES``.
    """
    figure = FIGURES[name]
    return svg_file(partial(_draw, data.rows, figure), f"{data.name}-{name}", figure.title)


def figure_png(data: AblationData, name: str) -> bytes:
    """Return the same figure as PNG."""
    with matplotlib.rc_context(STYLE | ON_PAPER):
        drawn = _draw(data.rows, FIGURES[name])
        FigureCanvasAgg(drawn)
        buffer = io.BytesIO()
        drawn.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    return buffer.getvalue()


def variant_name(row: ComparisonRow, rows: Sequence[ComparisonRow]) -> str:
    """Return what tells a row from the others besides backbone and threshold."""
    return ", ".join(f"{column.heading} {column.show(row)}" for column in variant_columns(rows))


def _draw(rows: Sequence[ComparisonRow], figure: AblationFigure) -> Figure:
    backbones = list(dict.fromkeys(row.cell.backbone for row in rows))
    names = list(dict.fromkeys(variant_name(row, rows) for row in rows))
    columns = min(_MOST_COLUMNS, len(backbones))
    lines = math.ceil(len(backbones) / columns)
    drawn = Figure(figsize=(7.4 if columns == 1 else 6.3 * columns, 0.5 + 4.5 * lines))
    panels: list[tuple[Axes, list[Line]]] = []
    for number, backbone in enumerate(backbones):
        axes = drawn.add_subplot(
            lines, columns, number + 1, sharex=panels[0][0] if panels else None
        )
        axes.set_title(shown_name(backbone))
        axes.set_xlabel("Token reduction on held-out text (%)")
        axes.set_ylabel(figure.axis)
        axes.margins(x=0.12, y=0.12)
        own = [row for row in rows if row.cell.backbone == backbone]
        variants = [variant_name(row, rows) for row in own]
        panels.append((axes, _lines(own, variants, names, figure.metric)))
        for line in panels[-1][1]:
            axes.plot(line.x, line.y, color=line.colour, marker=line.marker, linewidth=1.4)
    if len(names) > 1:
        legend(drawn, [(name, index) for index, name in enumerate(names)])
    for axes, found in panels:  # once all limits are final
        points = [list(zip(line.x, line.y, strict=True)) for line in found]
        labels = [
            (x, y, text, line.colour)
            for line, own in zip(found, points, strict=True)
            for (x, y), text in zip(own, line.texts, strict=True)
        ]
        place_labels(axes, labels, points)
    return drawn


def _lines(
    rows: Sequence[ComparisonRow], variants: Sequence[str], names: Sequence[str], metric: str
) -> list[Line]:
    """Return one line per variant that was measured, by rising token reduction."""
    found = []
    for index, name in enumerate(names):
        points = sorted(
            (100 * x, y, DASH if row.tau is None else f"τ {row.tau}")
            for row, variant in zip(rows, variants, strict=True)
            if variant == name
            and (x := row.metric("token_reduction")) is not None
            and (y := row.metric(metric)) is not None
        )
        if points:
            xs, ys, texts = zip(*points, strict=True)
            found.append(Line(xs, ys, texts, *mark(index)))
    return found
