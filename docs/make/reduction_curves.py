"""Curves of ``benchmarks/token_reduction``: names of policies, lines with errors, their legend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tasks.report.page_template import Report

POLICIES: Final = {
    "damage": "least damage",
    "count": "highest count",
    "saved": "most saved tokens",
    "all": "all rules",
    "eviction": "span eviction",
}
DASHES: Final = ("-", "--", ":")
_CHOOSING: Final = ("damage", "count", "saved")  # all rules are where each of these ends
_SUMMARISED: Final = ("count", "damage", "saved", "all", "eviction")  # the first that was measured


@dataclass(frozen=True)
class Curve:
    """A line: points by rising token reduction, and how they are drawn."""

    label: str
    points: list[Report]
    colour: str
    marker: str
    dash: str
    width: float = 1.4


def line_of(own: Sequence[Report], policy: str) -> list[Report]:
    """Return the points of a checkpoint's line of a policy, by rising token reduction.

    All rules end the line of each policy that chooses; without one they are a line of their own.
    """
    measured = {point["policy"] for point in own}
    chosen = measured.intersection(_CHOOSING)
    if policy not in measured or (policy == "all" and chosen):
        return []
    parts = {policy, "all"} if policy in chosen else {policy}
    points = [point for point in own if point["policy"] in parts]
    return sorted(points, key=lambda point: float(point["token_reduction"]))


def summarised(own: Iterable[Report]) -> str | None:
    """Return the policy that stands for a checkpoint where one is shown.

    It is fixed in advance: the best of several on the measured rows would be chosen by them, and
    what the policies really save differs.
    """
    measured = {point["policy"] for point in own}
    return next((policy for policy in _SUMMARISED if policy in measured), None)


def draw_curve(axes: Axes, curve: Curve, quantity: str) -> None:
    """Draw a quantity of a line's points against token reduction in per cent."""
    values = [point[quantity] for point in curve.points]
    axes.errorbar(
        [100 * point["token_reduction"] for point in curve.points],
        [value["mean"] for value in values],
        yerr=[value["std"] or 0.0 for value in values],
        color=curve.colour,
        marker=curve.marker,
        linestyle=curve.dash,
        markersize=5,
        linewidth=curve.width,
        elinewidth=0.8,
        capsize=2,
    )


def add_legend(figure: Figure, curves: Iterable[Curve]) -> None:
    """Put one legend above all panels, with a column for every 4 inches."""
    shown = list(curves)
    columns = int(figure.get_figwidth() // 4)
    handles = [
        Line2D(
            *([], []),
            color=c.colour,
            marker=c.marker,
            linestyle=c.dash,
            markersize=6,
            linewidth=c.width,
        )
        for c in shown
    ]
    labels = [curve.label for curve in shown]
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, handlelength=3.2)
