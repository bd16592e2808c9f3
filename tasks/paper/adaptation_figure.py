"""The figure of a task adaptation: accuracy change against token reduction.

One panel per backbone; a line per setting through its thresholds, which label its points; what has
no threshold is one labelled point. Error bars are the 95 % intervals that make a change clear; what
has no known error has no bar.
"""

from __future__ import annotations

import math
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tasks.paper.adaptation_page import ADAPTATION_TITLE
from tasks.paper.adaptation_rows import adaptation_rows
from tasks.report.page_template import Report
from tasks.report.report_drawing import (
    INK,
    Marks,
    draw_marks,
    label_marks,
    legend,
    svg_file,
)
from tasks.report.row_labels import shown_name


def adaptation_svg(report: Report) -> str:
    """Return the figure as an SVG file; the same content gives the same bytes.

    Args:
        report: Content of ``adaptation.json``.
    """
    return svg_file(partial(_draw, report), f"adaptation-{report['name']}", ADAPTATION_TITLE)


def _draw(report: Report) -> Figure:
    places = report["backbones"]
    rows = [adaptation_rows(place) for place in places]
    names = list(dict.fromkeys(row["setting"] for own in rows for row in own))
    drawn = Figure(figsize=(max(8.4, 6.3 * len(places)), 5.2))
    panels: list[tuple[Axes, list[Marks]]] = []
    for number, (place, own) in enumerate(zip(places, rows, strict=True)):
        axes = drawn.add_subplot(1, len(places), number + 1)
        axes.set(title=shown_name(place["backbone"]))
        axes.set_xlabel("Token reduction of the context (%)")
        axes.set_ylabel("Accuracy change against the base model\n(points; bars: 95 % intervals)")
        axes.margins(x=0.12, y=0.12)
        axes.axhline(0.0, color=INK, linewidth=0.8, linestyle=":")
        found = [_marks(index, own, name) for index, name in enumerate(names)]
        panels.append((axes, [marks for marks in found if marks.points]))
        draw_marks(*panels[-1])
    if names:
        legend(drawn, [(name, index) for index, name in enumerate(names)])
    for axes, found in panels:  # once all limits are final
        label_marks(axes, found, [0.0])
    return drawn


def _marks(index: int, rows: list[Report], name: str) -> Marks:
    """Return a setting's points by rising token reduction, a line where it has thresholds."""
    own = sorted(
        (row for row in rows if row["setting"] == name), key=lambda row: row["token_reduction"] or 0
    )
    return Marks(
        index,
        [(100 * (row["token_reduction"] or 0.0), 100 * row["difference"]) for row in own],
        [name if row["tau"] is None else f"τ {row['tau']}" for row in own],
        joined=any(row["tau"] is not None for row in own),
        errors=[math.nan if row["reach"] is None else 100 * row["reach"] for row in own],
    )
