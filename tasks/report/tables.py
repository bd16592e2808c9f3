"""Tables as cells: made of columns, shown in a terminal, in markdown and in HTML."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from rich.console import Console
from rich.table import Table as RichTable

DASH: Final = "–"
_ROOM: Final = 1 << 16  # rich takes of it what the cells need
_NOTE_WIDTH: Final = 140


@dataclass(frozen=True)
class Table:
    """Cells with headings.

    Attributes:
        title: Heading above the table.
        headings: One per column.
        rows: Cells, as shown.
        note: What the columns mean.
        left: Columns of text, aligned left; numbers go right.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str
    left: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        heading: What stands above it.
        show: Returns the cell of what a row is about.
        left: Whether it is text, aligned left.
    """

    heading: str
    show: Callable[[Any], str]
    left: bool = False


def number_column(
    heading: str, value: Callable[[Any], float | None], digits: int, scale: float = 1.0
) -> Column:
    """Return a column of numbers, as :func:`shown` formats them."""
    return Column(heading, lambda row: shown(value(row), digits, scale=scale))


def shown(value: float | None, digits: int, *, scale: float = 1.0) -> str:
    """Format a number, or return a dash for None, NaN and infinities."""
    if value is None or not math.isfinite(value):
        return DASH
    return f"{value * scale:,.{digits}f}"


def make_table(title: str, columns: Sequence[Column], rows: Sequence[Any], note: str = "") -> Table:
    """Return the rows under some columns; a column that no row has a value for is left out."""
    cells = [(column, [column.show(row) for row in rows]) for column in columns]
    kept = [(column, own) for column, own in cells if not rows or set(own) != {DASH}]
    return Table(
        title,
        tuple(column.heading for column, _ in kept),
        tuple(zip(*(own for _, own in kept), strict=True)),
        note,
        tuple(index for index, (column, _) in enumerate(kept) if column.left),
    )


def table_text(table: Table, width: int | None = None) -> str:
    """Return a table for a terminal, its note below it.

    Args:
        table: What to show; its title is left out.
        width: Columns of the terminal, where longer lines are cut; None gives the table the room
            it needs.

    Returns:
        Text without colour codes, ending in a newline.
    """
    drawn = RichTable(box=None, pad_edge=False, header_style="")
    for index, heading in enumerate(table.headings):
        side = "left" if index in table.left else "right"
        drawn.add_column(heading, justify=side, no_wrap=True)
    for row in table.rows:
        drawn.add_row(*row)
    printed = io.StringIO()
    console = Console(file=printed, width=width or _ROOM, color_system=None)
    console.print(drawn)
    console.width = width or _NOTE_WIDTH
    console.print(table.note, highlight=False)
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines()) + "\n"


def table_markdown(table: Table) -> str:
    """Return a table and its note as GitHub-flavoured markdown; its columns are aligned."""
    lines = [list(table.headings), *([escaped(cell) for cell in row] for row in table.rows)]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(lines[0]))]
    sides = [str.ljust if i in table.left else str.rjust for i in range(len(widths))]
    ends = ["-" if i in table.left else ":" for i in range(len(widths))]
    rule = ["-" * (width - 1) + end for width, end in zip(widths, ends, strict=True)]

    def text(line: list[str]) -> str:
        cells = (side(cell, w) for cell, side, w in zip(line, sides, widths, strict=True))
        return f"| {' | '.join(cells)} |"

    note = f"\n\n{escaped(table.note)}" if table.note else ""
    return "\n".join(map(text, [lines[0], rule, *lines[1:]])) + note


def table_html(table: Table) -> str:
    """Return a table and its note as HTML."""

    def line(tag: str, cells: Sequence[str]) -> str:
        sides = [' class="l"' if index in table.left else "" for index in range(len(cells))]
        pairs = zip(sides, cells, strict=True)
        return "".join(f"<{tag}{side}>{escape(cell)}</{tag}>" for side, cell in pairs)

    body = "".join(f"<tr>{line('td', cells)}</tr>" for cells in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<div class="scroll"><table><thead><tr>{line("th", table.headings)}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{note}"
    )


def escaped(text: str) -> str:
    """Return text that markdown shows as it is."""
    return text.replace("|", "\\|").replace("*", "\\*")
