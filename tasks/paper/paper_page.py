"""One page of all tables of the paper: its figures, ours, and what was not run with the reason.

Ours stand in tables of their own under the paper's: they are of other models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Final

from tasks.paper.printed import KINDS, Cell, NotRun, PaperTable, PrintedColumn, paper_tables
from tasks.report.html_page import html_page, inline_html
from tasks.report.tables import (
    DASH,
    Column,
    Table,
    make_table,
    shown,
    table_html,
    table_markdown,
)

TITLE: Final = "Tables of the paper: its figures and ours"
_LEAD: Final = (
    'The paper is "Distilling Sequential Computation in Transformer Language Models". Its figures '
    "are copied from its tables and are of its own backbones. Ours are read from the result files "
    "that each table names; they are of other, smaller models and other texts, so the two can be "
    "compared in direction, not in size. A figure marked † does not hold, for the reason below "
    "its table, and is nothing to compare with. Column `measured` of the list leads to the section "
    "of a table, where what was not run stands with the reason.",
    "`python -m flows report --tables` makes this page anew from `infra/paper_tables` and "
    "`docs/results`.",
)


@dataclass(frozen=True)
class PaperPage:
    """The page as markdown and as HTML, and the list of tables that leads it."""

    markdown: str
    html: str
    overview: Table


def paper_page(results: Path, folder: Path | None = None) -> PaperPage:
    """Return the page.

    Args:
        results: Folder of our result files.
        folder: Folder of the paper's tables; None: the repository's.

    Raises:
        ConfigError: If a table's data breaks a rule, or a result file is missing.
        KeyError: If a result file lacks a field that a table shows.
    """
    tables = paper_tables() if folder is None else paper_tables(folder)
    overview = _overview(tables, results)
    linked = _linked(overview, tables)
    texts = [f"# {TITLE}", *_LEAD, table_markdown(linked)]
    html = [f"<header><h1>{escape(TITLE)}</h1>", *(f"<p>{inline_html(text)}</p>" for text in _LEAD)]
    html += ["</header>", table_html(linked, inline_html)]
    for table in tables:
        heading = _heading(table)
        texts.append(f"## {heading}")
        html.append(f'<section id="{_anchor(heading)}"><h2>{escape(heading)}</h2>')
        for block in _blocks(table, results):
            if isinstance(block, Table):
                texts.append(table_markdown(block))
                html.append(table_html(block))
            else:
                texts.append(block)
                html.append(f"<p>{inline_html(block)}</p>")
        html.append("</section>")
    return PaperPage("\n\n".join(texts) + "\n", html_page(TITLE, "\n".join(html)), overview)


def _overview(tables: Sequence[PaperTable], results: Path) -> Table:
    columns = [
        Column("label", lambda table: f"{table.label}", left=True),
        Column("table", lambda table: table.title, left=True),
        Column("in the paper", _in_the_paper, left=True),
        Column("measured", lambda table: _measured(table, results), left=True),
        Column("ours, on", lambda table: _models(table, results) or DASH, left=True),
    ]
    return make_table("", columns, tables)


def _linked(overview: Table, tables: Sequence[PaperTable]) -> Table:
    """Return the list with a link to its section in each row, where the reasons stand."""
    at = overview.headings.index("measured")
    rows = tuple(
        (*row[:at], f"[{row[at]}](#{_anchor(_heading(table))})", *row[at + 1 :])
        for row, table in zip(overview.rows, tables, strict=True)
    )
    return replace(overview, rows=rows)


def _heading(table: PaperTable) -> str:
    return f"{table.label}: {table.title}"


def _anchor(heading: str) -> str:
    """Return the name that GitHub gives to a heading, for links."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _measured(table: PaperTable, results: Path) -> str:
    """Return whether a table is measured here, in part, or not."""
    there = any(not ours.awaited(results) for ours in table.ours)
    if not there:
        return "not run"
    return "in part" if _not_run(table, results) else "measured"


def _in_the_paper(table: PaperTable) -> str:
    if table.kind != "figures":
        return KINDS[table.kind].replace(";", ",").partition(",")[0]
    figures = [
        table.marks(row, name)
        for row in table.rows
        for name, cell in zip(table.names, row, strict=True)
        if isinstance(cell, int | float)
    ]
    marked = sum(map(bool, figures))
    return f"{len(figures)} figures" + (f", {marked} †" if marked else "")


def _models(table: PaperTable, results: Path) -> str:
    there = [ours.backbones for ours in table.ours if not ours.awaited(results)]
    return "; ".join(dict.fromkeys(there))


def _not_run(table: PaperTable, results: Path) -> list[NotRun]:
    """Return what was not run: what a command measures here, then what nothing here can."""
    awaited = [
        NotRun(
            what=ours.recipe or ours.model,
            why=f"no committed result; `{ours.measured_by}` measures it here",
        )
        for ours in table.ours
        if ours.awaited(results)
    ]
    return [*awaited, *table.not_run]


def _blocks(table: PaperTable, results: Path) -> Iterator[str | Table]:
    """Yield the paragraphs and tables of one table's section."""
    kind = "" if table.kind == "figures" else f" ({KINDS[table.kind]})"
    yield f"**The paper**{kind}: {table.caption}"
    if table.rows:
        yield _printed(table)
    for number, mark in enumerate(table.unsound, 1):
        yield f"†{number} {', '.join(mark.columns)}: {mark.reason}"
    for ours in table.ours:
        if ours.awaited(results):
            continue
        yield f"**Ours on {ours.model}**, `docs/results/{ours.file}`: {ours.differs}"
        yield ours.table(results)
        yield from ours.limits(results)
    for part in _not_run(table, results):
        yield f"`not run: {part.what}`: {part.why}."


def _printed(table: PaperTable) -> Table:
    """Return the paper's table, with a mark at each figure that does not hold."""
    rows = tuple(
        tuple(
            _cell(cell, column) + "".join(f" †{n + 1}" for n in table.marks(row, column.name))
            if cell is not None
            else DASH
            for cell, column in zip(row, table.columns, strict=True)
        )
        for row in table.rows
    )
    left = tuple(i for i, column in enumerate(table.columns) if column.digits is None)
    return Table("", tuple(column.heading for column in table.columns), rows, "", left)


def _cell(cell: Cell, column: PrintedColumn) -> str:
    return cell if isinstance(cell, str) else shown(cell, column.digits or 0)
