"""The paper's printed tables as data, one file each, with marks on the figures that do not hold.

``infra/paper_tables`` holds them in the paper's order. A table has its label, caption, columns with
units, and rows as printed. ``derived`` names columns that follow from others, so that a wrong
figure shows; ``unsound`` marks figures that do not hold and says why: they are shown, but never as
something to compare with.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from tasks.cluster.ray_cluster import CHECKOUT
from tasks.paper.measured import Measured
from umim_core.config.model_base import Model
from umim_core.config.recipe_files import read_recipe_file, validated
from umim_core.errors import ConfigError, did_you_mean

PAPER_TABLES: Final = CHECKOUT / "infra" / "paper_tables"
Cell = str | int | float | None
# Kind of a table -> what its figures are.
KINDS: Final = {
    "figures": "measured figures",
    "configuration": "settings of training, which the recipes repeat",
    "texts": "generated texts, not figures",
    "plot": "a figure; the paper prints no table, only the points that its text names",
}


class PrintedColumn(Model):
    """A column of a printed table; one without digits holds words."""

    name: str
    unit: str = ""
    digits: Annotated[int, Field(ge=0, le=6)] | None = None

    @property
    def heading(self) -> str:
        """Name with the unit."""
        return f"{self.name} ({self.unit})" if self.unit else self.name


class Derived(Model):
    """A column that follows from others of its row: a mean, a difference, a change, a share.

    With columns a, b: ``difference`` is a - b, ``change`` is 100 (a / b - 1), ``share`` is
    100 a / (a + b).
    """

    column: str
    rule: Literal["mean", "difference", "change", "share"]
    of: Annotated[tuple[str, ...], Field(min_length=2)]

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        if self.rule != "mean" and len(self.of) != 2:
            raise ValueError(f"{self.rule} is of two columns")
        return self

    def value(self, values: tuple[float, ...]) -> float:
        """Return what the column should hold, of the values of the others."""
        if self.rule == "mean":
            return sum(values) / len(values)
        first, second = values
        if self.rule == "difference":
            return first - second
        if self.rule == "change":
            return 100 * (first / second - 1)
        return 100 * first / (first + second)


class Unsound(Model):
    """Figures that do not hold: of the rows that begin with some cells (all if none is named)."""

    columns: Annotated[tuple[str, ...], Field(min_length=1)]
    rows: tuple[tuple[Cell, ...], ...] = ((),)
    reason: str

    def holds(self, row: tuple[Cell, ...], column: str) -> bool:
        """Return whether it marks a figure."""
        return column in self.columns and any(row[: len(head)] == head for head in self.rows)


class NotRun(Model):
    """A part of a table that was not run, and the reason."""

    what: str
    why: str


class PaperTable(Model):
    """A table or a figure of the paper, and where our figures for it lie."""

    label: Annotated[str, Field(pattern=r"^(tab|fig):[A-Za-z0-9_-]+$")]
    title: str
    kind: Literal["figures", "configuration", "texts", "plot"] = "figures"
    caption: str
    columns: tuple[PrintedColumn, ...]
    rows: tuple[tuple[Cell, ...], ...]
    derived: tuple[Derived, ...] = ()
    unsound: tuple[Unsound, ...] = ()
    ours: tuple[Measured, ...] = ()
    not_run: tuple[NotRun, ...] = ()

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return [column.name for column in self.columns]

    @model_validator(mode="after")
    def _cells_fit_their_columns(self) -> Self:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{row}: one cell for each of {len(self.columns)} columns")
            for cell, column in zip(row, self.columns, strict=True):
                if cell is not None and isinstance(cell, str) != (column.digits is None):
                    raise ValueError(f"{column.name}: {cell!r} is not of its kind")
        return self

    @model_validator(mode="after")
    def _marks_are_of_its_cells(self) -> Self:
        named = [name for mark in self.unsound for name in mark.columns]
        named += [name for rule in self.derived for name in (rule.column, *rule.of)]
        for name in named:
            if name not in self.names:
                raise ValueError(f"no column {name!r}; {did_you_mean(name, self.names)}")
        for mark in self.unsound:
            for head in mark.rows:
                if not any(row[: len(head)] == head for row in self.rows):
                    raise ValueError(f"unsound: no row begins with {list(head)}")
        return self

    @model_validator(mode="after")
    def _shown_or_explained(self) -> Self:
        if not self.ours and not self.not_run:
            raise ValueError("name where our figures lie, or why it was not run")
        return self

    def marks(self, row: tuple[Cell, ...], column: str) -> list[int]:
        """Return the numbers of the entries of ``unsound`` that mark a figure."""
        return [index for index, mark in enumerate(self.unsound) if mark.holds(row, column)]

    def deviations(self) -> Iterator[tuple[tuple[Cell, ...], str, float]]:
        """Yield row, column and recomputed value of derived figures that differ from the printed.

        A difference of one unit of the last printed digit is rounding.
        """
        for rule in self.derived:
            digits = self.columns[self.names.index(rule.column)].digits or 0
            for row in self.rows:
                cells = dict(zip(self.names, row, strict=True))
                values = [cells[name] for name in (rule.column, *rule.of)]
                numbers = tuple(float(value) for value in values if value is not None)
                if len(numbers) == len(values):
                    computed = rule.value(numbers[1:])
                    if abs(computed - numbers[0]) > 10.0**-digits * (1 + 1e-9):
                        yield row, rule.column, computed


def paper_tables(folder: Path = PAPER_TABLES) -> list[PaperTable]:
    """Return all tables, in the paper's order.

    Raises:
        ConfigError: If a file breaks a rule, or two have the same label.
    """
    tables: dict[str, PaperTable] = {}
    for path in sorted(folder.glob("*.yaml")):
        table = validated(PaperTable, read_recipe_file(path), path.name)
        if table.label in tables:
            raise ConfigError("a label belongs to one file", table.label, f"Rename {path.name}'s.")
        tables[table.label] = table
    return list(tables.values())
