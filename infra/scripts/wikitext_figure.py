"""The figure of wikitext_rules.py, which makes the checkout importable."""

from __future__ import annotations

import math
from typing import Any, Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tasks.report.report_drawing import PALETTE, STYLE, finish, standalone

_ROOM_FOR_NAMES: Final = 6.0  # times the most rules
_NAME_GAP: Final = 2.4  # percentage points between the names of two policies
Point = dict[str, Any]


def figure_svg(results: dict[str, Any], name: str) -> str:
    """Return the figure as an SVG file on white.

    Args:
        results: What ``wikitext_rules.py`` writes.
        name: File stem of the figure.
    """
    title = "Token reduction against number of rules"
    with matplotlib.rc_context(STYLE):
        return standalone(finish(draw(results), name, title, "", wide=True))


def draw(results: dict[str, Any]) -> Figure:
    """Draw one panel per tokenizer."""
    figure = Figure(figsize=(12.6, 4.9))
    first: Axes | None = None
    for number, tokenizer in enumerate(results["tokenizers"], 1):
        axes = figure.add_subplot(1, len(results["tokenizers"]), number, sharey=first)
        first = first or axes
        _draw_curves(axes, tokenizer["curve"], {cell["tau"] for cell in tokenizer["cells"]})
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_title(f"{tokenizer['name']} tokenizer")
        axes.set_xlabel("Number of rules")
        axes.set_ylabel("Token reduction on the test split (%)")
        axes.set_ylim(bottom=0)
        axes.set_xlim(right=axes.get_xlim()[1] * _ROOM_FOR_NAMES)
    return figure


def _draw_curves(axes: Axes, points: list[Point], marked: set[int]) -> None:
    """Draw each policy with its name at the end and a dot at the marked thresholds."""
    curves: dict[str, list[Point]] = {}
    for point in points:
        curves.setdefault(f"{point['overlap']} + {point['containment']}", []).append(point)
    colours = dict(zip(curves, PALETTE, strict=False))
    white = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    lowest = -math.inf  # where the next name may stand
    for name in sorted(curves, key=lambda name: float(curves[name][0]["token_reduction"])):
        colour = colours[name]
        x = [point["rules"] for point in curves[name]]
        y = [100 * point["token_reduction"] for point in curves[name]]
        axes.plot(x, y, color=colour)
        for point, at, high in zip(curves[name], x, y, strict=True):
            if point["tau"] not in marked:
                continue
            axes.plot([at], [high], marker="o", markersize=5, color=colour)
            if math.isinf(lowest):  # the lowest curve speaks for all
                axes.annotate(
                    f"τ = {point['tau']}",
                    (at, high),
                    xytext=(0, -7),
                    textcoords="offset points",
                    ha="center",
                    va="top",
                    fontsize=8.5,
                    color=colour,
                )
        lowest = max(y[0], lowest + _NAME_GAP)
        axes.annotate(
            name,
            (x[0], lowest),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            bbox=white,
        )
