"""Tables as cells, and how they look in a terminal and in markdown."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table as RichTable

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
    """Return a table as GitHub-flavoured markdown, without title and note, its columns aligned."""
    lines = [list(table.headings), *([escaped(cell) for cell in row] for row in table.rows)]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(lines[0]))]
    sides = [str.ljust if i in table.left else str.rjust for i in range(len(widths))]
    ends = ["-" if i in table.left else ":" for i in range(len(widths))]
    rule = ["-" * (width - 1) + end for width, end in zip(widths, ends, strict=True)]

    def text(line: list[str]) -> str:
        cells = (side(cell, w) for cell, side, w in zip(line, sides, widths, strict=True))
        return f"| {' | '.join(cells)} |"

    return "\n".join(map(text, [lines[0], rule, *lines[1:]]))


def escaped(text: str) -> str:
    """Return text that markdown shows as it is."""
    return text.replace("|", "\\|").replace("*", "\\*")
