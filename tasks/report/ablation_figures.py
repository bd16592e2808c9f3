"""The figures of an ablation: agreement and divergence against token reduction.

One panel per backbone, one line per variant (whatever differs between the cells besides backbone
and threshold), one labelled point per threshold. A variant has one colour and one marker in
all panels.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from functools import partial
from typing import Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tasks.report.ablation_data import AblationData
from tasks.report.ablation_page import FIGURES
from tasks.report.comparison import ComparisonRow
from tasks.report.comparison_table import variant_columns
from tasks.report.report_drawing import (
    ON_PAPER,
    STYLE,
    Marks,
    draw_marks,
    label_marks,
    legend,
    svg_file,
)
from tasks.report.row_labels import shown_name
from tasks.report.tables import DASH

_DPI: Final = 150
_MOST_COLUMNS: Final = 3


def figure_svg(data: AblationData, name: str) -> str:
    """Return a figure as an SVG file on white.

    Args:
        data: What to show.
        name: One of ``FIGURES``.
    """
    return svg_file(partial(_draw, data.rows, name), f"{data.name}-{name}", FIGURES[name].title)


def figure_png(data: AblationData, name: str) -> bytes:
    """Return the same figure as PNG."""
    with matplotlib.rc_context(STYLE | ON_PAPER):
        drawn = _draw(data.rows, name)
        FigureCanvasAgg(drawn)
        buffer = io.BytesIO()
        drawn.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    return buffer.getvalue()


def variant_name(row: ComparisonRow, rows: Sequence[ComparisonRow]) -> str:
    """Return what tells a row from the others besides backbone and threshold."""
    return ", ".join(f"{column.heading} {column.show(row)}" for column in variant_columns(rows))


def _draw(rows: Sequence[ComparisonRow], metric: str) -> Figure:
    backbones = list(dict.fromkeys(row.cell.backbone for row in rows))
    names = list(dict.fromkeys(variant_name(row, rows) for row in rows))
    columns = min(_MOST_COLUMNS, len(backbones))
    lines = math.ceil(len(backbones) / columns)
    drawn = Figure(figsize=(7.4 if columns == 1 else 6.3 * columns, 0.5 + 4.5 * lines))
    panels: list[tuple[Axes, list[Marks]]] = []
    for number, backbone in enumerate(backbones):
        share = panels[0][0] if panels else None
        axes = drawn.add_subplot(lines, columns, number + 1, sharex=share)
        axes.set(title=shown_name(backbone), ylabel=FIGURES[metric].axis)
        axes.set_xlabel("Token reduction on held-out text (%)")
        axes.margins(x=0.12, y=0.12)
        own = [(variant_name(r, rows), r) for r in rows if r.cell.backbone == backbone]
        panels.append((axes, _lines(own, names, metric)))
        draw_marks(*panels[-1])
    if len(names) > 1:
        legend(drawn, [(name, index) for index, name in enumerate(names)])
    for axes, found in panels:  # once all limits are final
        label_marks(axes, found)
    return drawn


def _lines(
    rows: Sequence[tuple[str, ComparisonRow]], names: Sequence[str], metric: str
) -> list[Marks]:
    """Return one line per variant that was measured, by rising token reduction."""
    found = []
    for index, name in enumerate(names):
        points = sorted(
            (100 * x, y, DASH if row.tau is None else f"τ {row.tau}")
            for variant, row in rows
            if variant == name
            and (x := row.metric("token_reduction")) is not None
            and (y := row.metric(metric)) is not None
        )
        if points:
            places, texts = [(x, y) for x, y, _ in points], [text for _, _, text in points]
            found.append(Marks(index, places, texts, joined=True))
    return found
