"""The figure of mining_scaling.py: time and memory against tokens, predicted and measured."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.common import Report
from benchmarks.pages import SCALING_FIGURE
from tasks.report.report_drawing import PALETTE, STYLE, finish, standalone

_ONE, _TWO, _PREDICTED = PALETTE[0], PALETTE[2], PALETTE[1]
_MIB: Final = 2.0**20
Points = dict[int, float]  # by tokens


def figure_svg(report: Report) -> str:
    """Return the figure as an SVG file on white."""
    title = "Time and memory of mining against tokens"
    with matplotlib.rc_context(STYLE):
        return standalone(finish(_figure(report), Path(SCALING_FIGURE).stem, title, "", wide=True))


def _figure(report: Report) -> Figure:
    measured = {int(size): found for size, found in report["measured"].items()}
    stated = {
        int(size): laws["decade"]
        for size, laws in report["predictions"].items()
        if "decade" in laws
    }
    seconds = {size: sum(found["seconds"].values()) for size, found in stated.items()}
    figure = Figure(figsize=(12.6, 4.9))
    time, memory = figure.subplots(1, 2)
    _measured(time, _of(measured, "nanoseconds_1"), _ONE, "o", "measured, 1 thread")
    _measured(time, _of(measured, "nanoseconds_2"), _TWO, "s", "measured, 2 threads")
    _predicted(time, {size: 1e9 * total / size for size, total in seconds.items()})
    time.set_title("Time")
    time.set_ylabel("Nanoseconds per token")
    time.set_ylim(bottom=0)
    peaks = {size: found["peak_bytes"] / _MIB for size, found in measured.items()}
    _measured(memory, peaks, _TWO, "s", "")
    _predicted(memory, {size: found["memory_bytes"] / _MIB for size, found in stated.items()})
    memory.set_title("Memory")
    memory.set_ylabel("Peak resident memory (MiB)")
    memory.set_yscale("log")
    memory.yaxis.set_major_formatter("{x:,.0f}")
    for axes in (time, memory):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("Tokens")
        axes.margins(x=0.08)
    handles, labels = time.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=3)
    return figure


def _of(measured: dict[int, Report], name: str) -> Points:
    return {size: found[name]["median"] for size, found in measured.items()}


def _measured(axes: Axes, points: Points, colour: str, marker: str, label: str) -> None:
    x = sorted(points)
    axes.plot(x, [points[size] for size in x], color=colour, marker=marker, label=label)


def _predicted(axes: Axes, points: Points) -> None:
    """Draw predictions hollow and larger, so that a measurement on top of one leaves both seen."""
    x = sorted(points)
    axes.plot(
        x,
        [points[size] for size in x],
        color=_PREDICTED,
        linestyle="--",
        linewidth=1.2,
        marker="D",
        markersize=10,
        markerfacecolor="none",
        label="predicted for 2 threads, before it was run",
    )
