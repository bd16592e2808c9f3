"""Charts of pages: panels of lines or points, drawn by matplotlib as SVG.

Layout and legends are matplotlib's own. The same data gives the same bytes. In a page, the colours
of text and grid become ``currentColor`` and a CSS variable, so that one drawing serves light and
dark pages.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, Final

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

# Distinguishable with the common colour deficiencies, readable on white and on near-black.
PALETTE: Final = (
    *("#3b7dd8", "#d9822b", "#2a9d78", "#9b6bc9", "#d2504a"),
    *("#8a8f3c", "#4aa3b5", "#c767a0", "#8b6a4f", "#7f8894"),
)
APART: Final = {"linestyle": "none"}  # look of points without a line through them
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")
_DASHES: Final = ("-", "--", ":", "-.")
# Of labels from their points, in points: neighbouring lines have theirs on other sides.
_CORNERS: Final = ((6, 6), (6, -7), (-6, 7), (-6, -6))
_INK, _GRID = "#22252a", "#d5d8dd"  # in a page: those of the page
_LABEL_WIDTH: Final = 60  # characters of a line of the legend
_NO_METADATA: Final = {"Date": None, "Creator": None, "Format": None, "Type": None}
_STYLE: Final[dict[RcKeyType, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "umim",
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
    "figure.constrained_layout.use": True,
}


@dataclass(frozen=True)
class Line:
    """Points of one kind, with a line through them or without."""

    label: str
    points: Sequence[tuple[float, float]]
    index: int = 0
    errors: Sequence[float] = ()
    texts: Sequence[str] = ()
    look: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Panel:
    lines: Sequence[Line] = ()
    axes: Mapping[str, Any] = field(default_factory=dict)  # title, labels, scales, limits, ticks
    levels: Sequence[float] = ()  # heights of horizontal lines


def look(index: int) -> dict[str, Any]:
    """Return colour, marker and dash of the nth kind; no two of forty look the same."""
    turn, place = divmod(index, len(PALETTE))
    marker = _MARKERS[(place + turn) % len(_MARKERS)]
    return {"color": PALETTE[place], "marker": marker, "linestyle": _DASHES[turn % len(_DASHES)]}


def chart(
    panels: Sequence[Panel], *, columns: int = 3, height: float = 4.4, width: float = 8.4
) -> Figure:
    """Draw panels side by side under one legend; ``width`` is that of a panel alone."""
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    width = width if columns == 1 else max(4.4, 12.6 / columns) * columns
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, rows * height))
        entries: dict[str, Artist] = {}
        for number, panel in enumerate(panels, 1):
            axes = figure.add_subplot(rows, columns, number)
            for label, artist in _draw(axes, panel).items():
                entries.setdefault(label, artist)
        if len(entries) > 1:
            _legend(figure, entries)
    return figure


def _draw(axes: Axes, panel: Panel) -> dict[str, Artist]:
    """Draw a panel and return what stands for each label in the legend."""
    entries: dict[str, Artist] = {}
    axes.margins(x=0.08, y=0.1)
    for number, line in enumerate(panel.lines):
        artist = _draw_line(axes, line, _CORNERS[number % len(_CORNERS)])
        if line.label:
            entries.setdefault(line.label, artist)
    for height in panel.levels:
        axes.axhline(height, color=_INK, linewidth=1.0, linestyle=":")
    axes.set(**panel.axes)
    places = [x for line in panel.lines for x, _ in line.points]
    if places and all(float(x).is_integer() for x in places) and "xscale" not in panel.axes:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if "xscale" in panel.axes:  # with ticks of its own
        axes.xaxis.set_minor_formatter(NullFormatter())
    return entries


def _draw_line(axes: Axes, line: Line, corner: tuple[int, int]) -> Artist:
    own = look(line.index) | dict(line.look)
    container = axes.errorbar(
        [x for x, _ in line.points],
        [y for _, y in line.points],
        yerr=line.errors or None,
        **{"markersize": 5.5, "linewidth": 1.4, "elinewidth": 0.8, "capsize": 2} | own,
    )
    for (x, y), text in zip(line.points, line.texts, strict=False):
        side = {"ha": "left" if corner[0] > 0 else "right", "va": "center"}
        place: dict[str, Any] = {"xytext": corner, "textcoords": "offset points", **side}
        axes.annotate(text, (x, y), fontsize=8, color=own["color"], **place)
    return container.lines[0]


def _legend(figure: Figure, entries: Mapping[str, Artist]) -> None:
    """Put the legend above all panels; the figure grows by its height."""
    labels = [wrapped(label) for label in entries]
    longest = max(len(line) for label in labels for line in label.splitlines())
    columns = max(1, min(len(labels), int(figure.get_figwidth() * 11.5 / (longest + 7))))
    lines = math.ceil(sum(label.count("\n") + 1 for label in labels) / columns)
    figure.set_figheight(figure.get_figheight() + 0.24 * lines)
    figure.legend(
        list(entries.values()), labels, loc="outside upper left", ncols=columns, handlelength=2.8
    )


def wrapped(label: str) -> str:
    return "\n".join(textwrap.wrap(label, _LABEL_WIDTH)) or label


def svg(figure: Figure, name: str, title: str) -> str:
    """Return a drawing as an ``<svg>`` element of a page."""
    drawn = _svg(figure, name, title)
    return drawn.replace(_INK, "currentColor").replace(_GRID, "var(--grid, #d5d8dd)")


def svg_file(figure: Figure, name: str, title: str) -> str:
    """Return a drawing as an SVG file on white; arguments are those of :func:`svg`."""
    drawn = _svg(figure, name, title)
    start = drawn.index(">") + 1
    return f'{drawn[:start]}<rect width="100%" height="100%" fill="#fff"/>{drawn[start:]}\n'


def _svg(figure: Figure, name: str, title: str) -> str:
    buffer = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font: \1px system-ui, sans-serif", text)
    text = re.sub(r'id="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'(url\(|href=")#', rf"\1#{name}-", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)
