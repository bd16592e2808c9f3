"""Tables as cells: made of columns, shown in a terminal and in Markdown."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

DASH: Final = "–"
_WIDTH: Final = 100  # of what a terminal is shown


@dataclass(frozen=True)
class Table:
    """Cells with headings."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str
    left: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    heading: str
    show: Callable[[Any], str]
    left: bool = False


def number_column(heading: str, value: Callable[[Any], float | None]) -> Column:
    """Return a column of whole numbers."""
    return Column(heading, lambda row: shown(value(row), 0))


def shown(value: float | None, digits: int, *, scale: float = 1.0) -> str:
    """Format a number, or return a dash for None, NaN and infinities."""
    if value is None or not math.isfinite(value):
        return DASH
    return f"{value * scale:,.{digits}f}"


def make_table(
    title: str, columns: Sequence[Column], rows: Sequence[Any], note: str = "", *, drop: bool = True
) -> Table:
    """Return the rows under some columns."""
    cells = [(column, [column.show(row) for row in rows]) for column in columns]
    shown = [(column, own) for column, own in cells if not drop or not rows or set(own) != {DASH}]
    return Table(
        title,
        tuple(column.heading for column, _ in shown),
        tuple(zip(*(own for _, own in shown), strict=True)),
        note,
        tuple(index for index, (column, _) in enumerate(shown) if column.left),
    )


def _aligned(table: Table, lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return lines of cells with all cells of a column as wide as the widest, and at least 3."""
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    sides = [str.ljust if index in table.left else str.rjust for index in range(len(widths))]
    return [
        [side(cell, width) for cell, side, width in zip(line, sides, widths, strict=True)]
        for line in lines
    ]


def table_text(table: Table) -> str:
    """Return a table without its title for a terminal, the note below it, ending in a newline.

    A table of more than 100 columns of characters is shown in parts, one below the other; each
    begins with the columns that say what a row is about.
    """
    cells = _aligned(table, [table.headings, *table.rows])
    blocks = []
    for columns in _parts(table, [len(cell) for cell in cells[0]]):
        lines = ["  ".join(line[column] for column in columns).rstrip() for line in cells]
        blocks.append("\n".join(lines))
    note = textwrap.wrap(table.note, _WIDTH)
    return "\n".join(["\n\n".join(blocks), *note]) + "\n"


def _parts(table: Table, widths: Sequence[int]) -> list[list[int]]:
    """Return the columns of each part of a table: those up to the last of text, then numbers."""
    names = list(range(max(table.left, default=-1) + 1))
    parts, room = [list(names)], _WIDTH - sum(widths[column] + 2 for column in names) + 2
    left = room
    for column in range(len(names), len(widths)):
        if widths[column] + 2 > left and len(parts[-1]) > len(names):
            parts.append(list(names))
            left = room
        parts[-1].append(column)
        left -= widths[column] + 2
    return parts


def table_markdown(table: Table) -> str:
    """Return a table and its note as GitHub-flavoured markdown; its columns are aligned."""
    rows = [[escaped(cell) for cell in row] for row in table.rows]
    head, *body = _aligned(table, [table.headings, *rows])
    ends = ["-" if index in table.left else ":" for index in range(len(head))]
    rule = ["-" * (len(cell) - 1) + end for cell, end in zip(head, ends, strict=True)]
    note = ["", escaped(table.note)] if table.note else []
    return "\n".join([*(f"| {' | '.join(line)} |" for line in (head, rule, *body)), *note])


def escaped(text: str) -> str:
    """Return text that markdown shows as it is."""
    return text.replace("|", "\\|").replace("*", "\\*")
