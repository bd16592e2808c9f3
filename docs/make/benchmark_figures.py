"""Figures of the benchmarks: cost of mining against tokens, cache memory and batch capacity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from docs.make.generation_pages import MERGE_LABELS
from tasks.report.page_template import Report
from tasks.report.report_drawing import PALETTE

_MIB: Final = 2.0**20
_WIDTH: Final = 0.27  # of a bar


def scaling_figure(report: Report) -> Figure:
    """Draw time and memory of mining against tokens, predicted and measured."""
    measured = {int(size): found for size, found in report["measured"].items()}
    laws = {
        int(size): law["decade"] for size, law in report["predictions"].items() if "decade" in law
    }
    figure = Figure(figsize=(12.6, 4.9))
    time, memory = figure.subplots(1, 2)
    for threads, colour, marker in ((1, PALETTE[0], "o"), (2, PALETTE[2], "s")):
        speeds = {
            size: found[f"nanoseconds_{threads}"]["median"] for size, found in measured.items()
        }
        label = f"measured, {threads} thread{'s' * (threads > 1)}"
        _draw(time, speeds, color=colour, marker=marker, label=label)
    _predicted(time, {n: 1e9 * sum(law["seconds"].values()) / n for n, law in laws.items()})
    peaks = {size: found["peak_bytes"] / _MIB for size, found in measured.items()}
    _draw(memory, peaks, color=PALETTE[2], marker="s")
    _predicted(memory, {size: law["memory_bytes"] / _MIB for size, law in laws.items()})
    time.set(title="Time", ylabel="Nanoseconds per token")
    time.set_ylim(bottom=0)
    memory.set(title="Memory", ylabel="Peak resident memory (MiB)", yscale="log")
    memory.yaxis.set_major_formatter("{x:,.0f}")
    for axes in (time, memory):
        axes.set(xscale="log", xlabel="Tokens")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.margins(x=0.08)
    return _with_legend(figure, time)


def _draw(axes: Axes, points: Mapping[int, float], **style: object) -> None:
    axes.plot(*zip(*sorted(points.items()), strict=True), **style)


def _predicted(axes: Axes, points: Mapping[int, float]) -> None:
    """Draw predictions hollow and larger, so that a measurement on top of one leaves both seen."""
    hollow = {"marker": "D", "markersize": 10, "markerfacecolor": "none"}
    label = "predicted for 2 threads, before it was run"
    _draw(axes, points, color=PALETTE[1], linestyle="--", linewidth=1.2, label=label, **hollow)


def capacity_figure(report: Report) -> Figure:
    """Draw the cache memory of a row, and how many rows fit into the same memory."""
    subjects = report["subjects"]
    figure = Figure(figsize=(12.6, 0.6 + 3.3 * len(subjects)))
    grid = figure.subplots(len(subjects), 2, squeeze=False)
    budget = f"{report['budget_bytes'] / _MIB:,.0f} MiB"
    for (memory, rows), (name, found) in zip(grid, subjects.items(), strict=True):
        _bars(memory, found["rows"], "bytes_mean", 1 / _MIB, "{:.2f}")
        memory.set(title=f"{name}: cache of a row", ylabel="MiB (mean)")
        _bars(rows, found["rows"], "sequences", 1, "{:,.0f}")
        rows.set(title=f"{name}: rows in {budget}, at the final length", ylabel="Rows")
    return _with_legend(figure, grid[0][0])


def _bars(axes: Axes, rows: list[Report], quantity: str, scale: float, shown: str) -> None:
    """Draw one group of bars per prompt length."""
    lengths = sorted({row["prompt_tokens"] for row in rows})
    for index, (merge, label) in enumerate(MERGE_LABELS.items()):
        values = {row["prompt_tokens"]: row[quantity] for row in rows if row["merge"] == merge}
        heights = [scale * values[length] for length in lengths]
        places = [place + (index - 1) * _WIDTH for place in range(len(lengths))]
        bars = axes.bar(places, heights, _WIDTH * 0.94, color=PALETTE[index], label=label)
        axes.bar_label(bars, [shown.format(height) for height in heights], padding=2, fontsize=8.5)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_xlabel("Prompt length (raw tokens)")
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.12)


def _with_legend(figure: Figure, axes: Axes) -> Figure:
    """Put the legend of one panel above all of them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=3)
    return figure
