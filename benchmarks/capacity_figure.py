"""The figure of cache_capacity.py: memory of a row and rows at equal memory, base and UMIM."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.common import Report
from benchmarks.generation_pages import CAPACITY_FIGURE, MERGE_LABELS
from tasks.report.report_drawing import ON_PAPER, PALETTE, STYLE, finish, standalone

_MIB: Final = 2.0**20
_WIDTH: Final = 0.27


def figure_svg(report: Report) -> str:
    """Return the figure as an SVG file on white."""
    title = "Cache memory of a row, and rows that fit into the same memory"
    with matplotlib.rc_context({**STYLE, **ON_PAPER}):
        drawn = finish(_figure(report), Path(CAPACITY_FIGURE).stem, title, "", wide=True)
    return standalone(drawn)


def _figure(report: Report) -> Figure:
    subjects = report["subjects"]
    figure = Figure(figsize=(12.6, 0.6 + 3.3 * len(subjects)))
    grid = figure.subplots(len(subjects), 2, squeeze=False)
    budget = f"{report['budget_bytes'] / _MIB:,.0f} MiB"
    for (memory, rows), (name, found) in zip(grid, subjects.items(), strict=True):
        _bars(memory, found["rows"], "bytes_mean", 1 / _MIB, "{:.2f}")
        memory.set_title(f"{name}: cache of a row")
        memory.set_ylabel("MiB (mean)")
        _bars(rows, found["rows"], "sequences", 1, "{:,.0f}")
        rows.set_title(f"{name}: rows in {budget}, at the final length")
        rows.set_ylabel("Rows")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=3)
    return figure


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
