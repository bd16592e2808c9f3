"""Drawing kit of report, ablations and benchmarks: style, marks, labels, SVG that suits the page.

Text and axes are drawn in marker colours that are replaced by ``currentColor`` and a CSS variable,
so that one drawing serves light and dark pages. The same data gives the same bytes.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tasks.report.label_placement import place_labels

# Distinguishable with the common colour deficiencies, readable on white and on near-black.
PALETTE: Final = ("#3b7dd8", "#d9822b", "#2a9d78", "#9b6bc9", "#d2504a", "#8a8f3c", "#4aa3b5")
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")
INK: Final = "#010203"
_GRID: Final = "#040506"
_LABEL_WIDTH: Final = 60  # characters
STYLE: Final[dict[str, object]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "umim",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "figure.constrained_layout.use": True,
}
# Over STYLE, for files without a page around them: the colours that a page would give.
ON_PAPER: Final[dict[str, object]] = {
    **{name: "#22252a" for name, value in STYLE.items() if value == INK},
    **{name: "#d5d8dd" for name, value in STYLE.items() if value == _GRID},
    "figure.facecolor": "white",
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


def standalone(figure: ReportFigure) -> str:
    """Return a figure as a file of its own, on white."""
    start = figure.svg.index(">") + 1
    white = '<rect width="100%" height="100%" fill="#fff"/>'
    return figure.svg[:start] + white + figure.svg[start:] + "\n"


def svg_file(
    draw: Callable[[], Figure], name: str, title: str, style: Mapping[str, object] = STYLE
) -> str:
    """Draw a figure and return it as an SVG file of its own.

    Args:
        draw: Draws it.
        name: File stem.
        title: What it shows.
        style: Settings of matplotlib.
    """
    with matplotlib.rc_context(style):
        return standalone(finish(draw(), name, title, ""))


def mark(index: int) -> tuple[str, str]:
    """Return the colour and the marker of the nth thing; no two of 49 share both."""
    turn = index // len(PALETTE)
    return PALETTE[index % len(PALETTE)], MARKERS[(index + turn) % len(MARKERS)]


def legend(figure: Figure, entries: Sequence[tuple[str, int]], *, lines: bool = False) -> None:
    """Put the legend above the drawing area, never over data."""
    handles = [
        Line2D(
            [],
            [],
            color=mark(index)[0],
            marker=None if lines else mark(index)[1],
            linestyle="-" if lines else "none",
            markersize=7,
        )
        for _, index in entries
    ]
    wrapped = [wrapped_label(label) for label, _ in entries]
    longest = max(len(line) for label in wrapped for line in label.splitlines())
    columns = max(1, int(figure.get_figwidth() * 11 / (longest + 6)))
    figure.legend(handles, wrapped, loc="outside upper left", ncols=columns)


def wrapped_label(label: str) -> str:
    """Return a label in lines that fit next to a figure of half a page's width."""
    return "\n".join(textwrap.wrap(label, _LABEL_WIDTH)) or label


@dataclass(frozen=True)
class Marks:
    """Points that share a colour and a marker.

    Attributes:
        index: Place in the legend, which decides both.
        points: (x, y), at least one.
        texts: Labels of the points; empty for none.
        joined: Whether a line runs through them.
        hollow: Whether only the markers' edges are drawn.
        errors: Half the length of each point's error bar, in data units, NaN for a point without
            one; empty if none has one.
    """

    index: int
    points: Sequence[tuple[float, float]]
    texts: Sequence[str] = ()
    joined: bool = False
    hollow: bool = False
    errors: Sequence[float] = ()


def draw_marks(axes: Axes, things: Sequence[Marks]) -> None:
    """Draw points, their lines and their error bars."""
    for thing in things:
        colour, marker = mark(thing.index)
        axes.errorbar(
            *zip(*thing.points, strict=True),
            yerr=thing.errors or None,
            fmt=f"{marker}-" if thing.joined else marker,
            color=colour,
            markerfacecolor="none" if thing.hollow else colour,
            markersize=6 if thing.joined else 7,
            linewidth=1.4,
            elinewidth=1,
            capsize=2,
        )


def label_marks(axes: Axes, things: Sequence[Marks], heights: Sequence[float] = ()) -> None:
    """Write the points' labels, off everything that is drawn.

    Args:
        axes: With final limits, and the figure's legend.
        things: What :func:`draw_marks` drew.
        heights: Where horizontal lines were drawn besides.
    """
    lines = [[(x, height) for x in axes.get_xlim()] for height in heights]
    for thing in things:
        bars = zip(thing.points, thing.errors, strict=False)  # no point has one, or every point
        lines += [[(x, y - e), (x, y + e)] for (x, y), e in bars if not math.isnan(e)]
        lines += [thing.points] if thing.joined else []
    labels = [
        (x, y, text, mark(thing.index)[0])
        for thing in things
        for (x, y), text in zip(thing.points, thing.texts, strict=True)
    ]
    place_labels(axes, labels, lines)


def finish(
    figure: Figure, name: str, title: str, caption: str, *, wide: bool = False
) -> ReportFigure:
    """Turn a drawing into SVG for a page.

    Args:
        figure: The drawing.
        name: File stem; ids inside the SVG begin with it, so that figures share a page.
        title: What it shows.
        caption: How to read it.
        wide: Whether it takes the full width of the page.
    """
    buffer = io.StringIO()
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = svg.replace(INK, "currentColor").replace(_GRID, "var(--grid, #d5d8dd)")
    svg = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font: \1px system-ui, sans-serif", svg)
    svg = re.sub(r'id="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{name}-", svg)
    label = f'<svg role="img" aria-label="{escape(title)}"'
    return ReportFigure(name, title, caption, svg.replace("<svg", label, 1), wide)
