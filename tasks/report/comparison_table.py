"""Tables of comparison rows as people read them: columns, legends, the comparison itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tasks.report.comparison import ComparisonRow, made_by, shown_name
from tasks.report.tables import Table, escaped, table_markdown, table_text

DASH: Final = "–"
STATES: Final = (
    "which depend on the rules; states: at every state that decoding passes through, to compare "
    "rules by."
)


@dataclass(frozen=True)
class Column:
    """One column of a table of rows.

    Attributes:
        heading: What stands above it.
        show: Returns a row's cell.
        left: Whether it is text, aligned left.
    """

    heading: str
    show: Callable[[ComparisonRow], str]
    left: bool = False


def metric_column(heading: str, name: str, digits: int, scale: float = 1.0) -> Column:
    """Return the column of a metric."""
    return Column(heading, lambda row: shown(row.metric(name), digits, scale=scale))


TAU: Final = Column("τ", lambda row: DASH if row.tau is None else str(row.tau))
_VARIANTS: Final = (
    Column("rules by", lambda row: made_by(row.rule_source, row.min_probability), left=True),
    Column("overlap", lambda row: row.overlap, left=True),
    Column("containment", lambda row: row.containment, left=True),
    Column("most rules", lambda row: shown(row.rule_budget, 0)),
    Column("tokens asked", lambda row: shown(row.confidence_tokens, 0)),
    Column("revision", lambda row: row.revision or DASH, left=True),
    Column("positions", lambda row: row.positions, left=True),
    Column("depth", lambda row: str(row.depth)),
    Column("kind", lambda row: row.kind, left=True),
    Column("unit positions", lambda row: row.unit_positions, left=True),
)


def variant_columns(rows: Sequence[ComparisonRow]) -> tuple[Column, ...]:
    """Return the columns of what differs between the rows, besides backbone and threshold."""
    return tuple(column for column in _VARIANTS if len({column.show(row) for row in rows}) > 1)


def make_table(columns: Sequence[Column], rows: Sequence[ComparisonRow], note: str) -> Table:
    """Return the rows under some columns; one that no row has a value for is left out."""
    return filled(
        Table(
            "",
            tuple(column.heading for column in columns),
            tuple(tuple(column.show(row) for column in columns) for row in rows),
            note,
            tuple(index for index, column in enumerate(columns) if column.left),
        )
    )


def filled(table: Table) -> Table:
    """Return a table without the columns that hold nothing but dashes."""
    kept = [
        index
        for index in range(len(table.headings))
        if not table.rows or any(row[index] != DASH for row in table.rows)
    ]
    return replace(
        table,
        headings=tuple(table.headings[index] for index in kept),
        rows=tuple(tuple(row[index] for index in kept) for row in table.rows),
        left=tuple(new for new, index in enumerate(kept) if index in table.left),
    )


def comparison(rows: Sequence[ComparisonRow]) -> Table:
    """Return the comparison as people read it, a dash where nothing was measured."""
    columns = (
        Column("backbone", lambda r: shown_name(r.backbone) + " *" * (r.source == "shipped"), True),
        TAU,
        *variant_columns(rows),
        Column("setting", lambda row: row.setting, left=True),
        metric_column("TR %", "token_reduction", 1, 100),
        metric_column("Top-1", "top1", 3),
        metric_column("Top-1 states", "top1_states", 3),
        metric_column("PPL base", "ppl_base", 2),
        metric_column("PPL UMIM", "ppl_umim", 2),
        Column("acc. base", lambda row: shown(row.accuracy("base"), 1, scale=100)),
        Column("acc. WT", lambda row: shown(_plain_accuracy(row), 1, scale=100)),
        Column("acc. adapted", lambda row: shown(row.accuracy(_adapted(row)), 1, scale=100)),
        metric_column("prefill ×", "prefill_speedup", 2),
    )
    table = make_table(columns, rows, "")
    return replace(table, note=notes(rows, table.headings))


def _plain_accuracy(row: ComparisonRow) -> float | None:
    return row.accuracy("WT") if row.setting == "WT" else None


def _adapted(row: ComparisonRow) -> str:
    """Return which accuracy the last column shows: the final setting's, or the row's own."""
    return "Task-Adapted" if row.setting == "WT" else row.setting


def shown(value: float | None, digits: int, *, scale: float = 1.0) -> str:
    """Format a number, or return a dash for None, NaN and infinities."""
    if value is None or not math.isfinite(value):
        return DASH
    return f"{value * scale:,.{digits}f}"


def notes(rows: Sequence[ComparisonRow], headings: Sequence[str]) -> str:
    """Return the line below the table that explains its columns."""
    unit_ends = f"unit ends, {STATES}" if "Top-1 states" in headings else "unit ends."
    sentences = (
        ("TR %", "TR: tokens removed by merging, realised."),
        ("Top-1", f"Top-1: agreement with the base model at {unit_ends}"),
        ("PPL", "PPL: per raw token, in-domain."),
        ("acc.", "acc.: task accuracy in %."),
        ("prefill", "prefill ×: base time / UMIM time."),
    )
    said = [text for of, text in sentences if any(name.startswith(of) for name in headings)]
    shipped = any(row.source == "shipped" for row in rows)
    return " ".join([*said, *(["*: shipped checkpoint."] if shipped else [])])


def comparison_table(rows: Sequence[ComparisonRow], width: int | None = None) -> str:
    """Return the comparison for a terminal, as :func:`tasks.report.tables.table_text`."""
    return table_text(comparison(rows), width)


def comparison_markdown(rows: Sequence[ComparisonRow]) -> str:
    """Return the same table as GitHub-flavoured markdown, notes below it."""
    table = comparison(rows)
    return f"{table_markdown(table)}\n\n{escaped(table.note)}\n"
