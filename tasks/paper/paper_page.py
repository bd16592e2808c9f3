"""One page of all tables of the paper: its figures, ours, and what was not run with the reason.

Ours stand in tables of their own under the paper's: they are of other models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tasks.paper.printed import KINDS, NotRun, PaperTable, paper_tables
from tasks.report.render import Report, anchor, html_page, markdown_html, page
from tasks.report.tables import DASH, Column, Table, make_table, shown, table_markdown

TITLE: Final = "Tables of the paper: its figures and ours"


@dataclass(frozen=True)
class PaperPage:
    """The page as Markdown and as HTML, and the list of tables that leads it."""

    markdown: str
    html: str
    overview: Table


def paper_page(results: Path, folder: Path | None = None) -> PaperPage:
    """Return the page."""
    tables = paper_tables() if folder is None else paper_tables(folder)
    overview = _overview(tables, results)
    shown_tables = [_section(table, results) for table in tables]
    place = overview.headings.index("measured")
    linked = tuple(
        (*row[:place], f"[{row[place]}](#{anchor(table['heading'])})", *row[place + 1 :])
        for row, table in zip(overview.rows, shown_tables, strict=True)
    )
    listed = table_markdown(replace(overview, rows=linked))
    values = {"title": TITLE, "overview": listed, "tables": shown_tables}
    markdown = page("paper_tables.md", values) + "\n"
    return PaperPage(markdown, html_page(TITLE, markdown_html(markdown)), overview)


def _overview(tables: Sequence[PaperTable], results: Path) -> Table:
    columns = [
        Column("label", lambda table: f"{table.label}", left=True),
        Column("table", lambda table: table.title, left=True),
        Column("in the paper", _in_the_paper, left=True),
        Column("measured", lambda table: _measured(table, results), left=True),
        Column("ours, on", lambda table: _models(table, results) or DASH, left=True),
    ]
    return make_table("", columns, tables)


def _measured(table: PaperTable, results: Path) -> str:
    """Return whether a table is measured here, in part, or not."""
    if table.kind == "configuration":
        return "in recipes"
    if all(ours.awaited(results) for ours in table.ours):
        return "not run"
    return "in part" if _not_run(table, results) else "measured"


def _in_the_paper(table: PaperTable) -> str:
    if table.kind != "figures":
        return KINDS[table.kind].replace(";", ",").partition(",")[0]
    marks = [
        table.marks(row, name)
        for row in table.rows
        for name, cell in zip(table.names, row, strict=True)
        if isinstance(cell, int | float)
    ]
    unsound = sum(map(bool, marks))
    return f"{len(marks)} figures" + (f", {unsound} †" if unsound else "")


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


def _section(table: PaperTable, results: Path) -> Report:
    """Return what the page's template shows of one table."""
    ours = [
        {
            "model": own.model,
            "file": own.file,
            "differs": own.differs,
            "table": table_markdown(own.table(results)),
            "limits": own.limits(results),
        }
        for own in table.ours
        if not own.awaited(results)
    ]
    return {
        "heading": f"{table.label}: {table.title}",
        "kind": "" if table.kind == "figures" else KINDS[table.kind],
        "caption": table.caption,
        "printed": table_markdown(_printed(table)) if table.rows else "",
        "unsound": table.unsound,
        "ours": ours,
        "not_run": _not_run(table, results),
    }


def _printed(table: PaperTable) -> Table:
    """Return the paper's table, with a mark at each figure that does not hold."""

    def column(place: int) -> Column:
        of = table.columns[place]

        def cell(row: Sequence[object]) -> str:
            value = row[place]
            if value is None:
                return DASH
            marks = "".join(f" †{n + 1}" for n in table.marks(tuple(row), of.name))
            return (value if isinstance(value, str) else shown(value, of.digits or 0)) + marks

        return Column(of.heading, cell, left=of.digits is None)

    columns = [column(place) for place in range(len(table.columns))]
    return make_table("", columns, table.rows, drop=False)
