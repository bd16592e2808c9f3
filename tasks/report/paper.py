"""The paper's printed tables as data, and one page of them, ours, and what was not run, and why.

``infra/paper_tables`` holds them in the paper's order, one file each: label, caption, columns with
units, rows as printed. ``unsound`` marks figures that do not hold and says why: they are shown, but
never as something to compare with. Ours stand in tables of their own: they are of other models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from tasks.cluster.ray_cluster import CHECKOUT
from tasks.report.render import DASH, Table, data_table, formatted, page, table_markdown, walk
from umim_core.config.model_base import Model, validated
from umim_core.config.recipe_files import read_recipe_file
from umim_core.errors import ConfigError, require

PAPER_TABLES: Final = CHECKOUT / "infra" / "paper_tables"
Cell = str | int | float | None
# Kind of a table -> what its figures are.
KINDS: Final = {
    "figures": "measured figures",
    "configuration": "settings of training, which the recipes repeat",
    "texts": "generated texts, not figures",
    "plot": "a figure; the paper prints no table, only the points that its text names",
}


class Ours(Model):
    """Source of our figures for a table, and their differences to the paper's protocol."""

    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+\.json$")]
    model: str
    differs: str
    rows: str
    where: dict[str, tuple[str | int | float | bool | None, ...]] = Field(default_factory=dict)
    without: dict[str, tuple[str | int | float | bool | None, ...]] = Field(default_factory=dict)
    words: dict[str, dict[str, str]] = Field(default_factory=dict)
    columns: str
    recipe: Annotated[str, Field(pattern=r"^(tables|adaptation)/[a-z0-9._-]+$")] | None = None
    command: str | None = None
    commit: str | None = None

    @property
    def backbones(self) -> str:
        """The model in short, as a list of all tables names it."""
        return re.sub(r" \([^)]*\)", "", self.model).removeprefix("the embedded ")

    def table(self, folder: Path) -> Table:
        """Return the figures as a table; a task that was not run has no row next to others."""
        _, rows = self._read(folder)
        run = [row for row in rows if "not_run" not in row]
        return data_table(self.columns, run or rows)

    def limits(self, folder: Path) -> list[str]:
        """Return paragraphs on what a recipe's figures are of, and on tasks not run."""
        results, rows = self._read(folder)
        if results.get("kind") == "adaptation":
            test, train, valid = (results["questions"][x] for x in ("test", "train", "valid"))
            return [
                f"Limits: {test:,} test questions; rules and training from {train:,} others, "
                f"selection on {valid:,}; backbone in {results['dtype']}."
            ]
        if results.get("kind") != "paper_table":
            return []
        amounts: dict[str, list[str]] = {}
        unrun: dict[str, list[str]] = {}
        for task, row in {str(row.get("task_word", row.get("task"))): row for row in rows}.items():
            if "not_run" in row:
                unrun.setdefault(row["not_run"], []).append(task)
            elif "questions" in row:
                amounts.setdefault(_amount(row), []).append(task)
        parts = [f"{', '.join(tasks)}: {amount}" for amount, tasks in amounts.items()]
        parts.append(f"backbone in {results['dtype']}")
        return [
            f"Limits: {'; '.join(parts)}.",
            *(f"`{reason}`: {', '.join(tasks)}." for reason, tasks in unrun.items()),
        ]

    def _read(self, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the results, and the rows that are shown of them."""
        path = folder / self.file
        if not path.is_file():
            known = ", ".join(sorted(file.name for file in folder.glob("*.json")))
            raise ConfigError("a result file must exist", str(path), f"There are {known}.")
        results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        first = next(iter(results.get("settings") or ()), None)
        rows = [self._worded(row) for row in walk(results, self.rows) if self._shown(row)]
        for row in rows:
            if row.get("setting") == first:  # has no differences to itself
                for name in [name for name in row if name.endswith("_difference")]:
                    del row[name]
        rule = f"{self.file} must have rows of {self.rows}"
        require(bool(rows), ConfigError, rule, self.where, "Correct the entry.")
        return results, rows

    def _shown(self, row: dict[str, Any]) -> bool:
        return all(_field(row, name) in values for name, values in self.where.items()) and not any(
            _field(row, name) in values for name, values in self.without.items()
        )

    def _worded(self, row: dict[str, Any]) -> dict[str, Any]:
        texts = {name: str(_field(row, name)) for name in self.words}
        return row | {
            f"{name}_word": self.words[name].get(text, text) for name, text in texts.items()
        }


def _amount(row: Mapping[str, Any]) -> str:
    """Return how many questions a task has, and how many answers of what length."""
    amount = f"{row['questions']:,} questions"
    if "new_tokens" not in row:
        return amount
    answers = "one answer" if row["answers"] == 1 else f"{row['answers']} answers each"
    return f"{amount}, {answers} of at most {row['new_tokens']:,} tokens"


def _field(row: Mapping[str, Any], name: str) -> Any:
    """Return a field, or one below it by its path; None for one that is absent."""
    first, _, rest = name.partition(".")
    return _field(row.get(first) or {}, rest) if rest else row.get(first)


class PrintedColumn(Model):
    """A column of a printed table; one without digits holds words."""

    name: str
    unit: str = ""
    digits: Annotated[int, Field(ge=0, le=6)] | None = None


class Unsound(Model):
    """Figures that do not hold: of the rows that begin with some cells (all if none is named)."""

    columns: Annotated[tuple[str, ...], Field(min_length=1)]
    rows: tuple[tuple[Cell, ...], ...] = ((),)
    reason: str

    def holds(self, row: tuple[Cell, ...], column: str) -> bool:
        return column in self.columns and any(row[: len(head)] == head for head in self.rows)


class NotRun(Model):
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
    unsound: tuple[Unsound, ...] = ()
    ours: tuple[Ours, ...] = ()
    not_run: tuple[NotRun, ...] = ()

    @model_validator(mode="after")
    def _whole_rows(self) -> Self:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"a row must have {len(self.columns)} cells, not {len(row)}: {row}"
                )
        return self

    def with_results(self, folder: Path) -> PaperTable:
        """Return the table with those of our figures that a folder holds; others are not run."""
        held = tuple(own for own in self.ours if (folder / own.file).is_file())
        absent = (own for own in self.ours if own not in held)
        unrun = [NotRun(what=own.model, why=f"there is no {own.file}") for own in absent]
        return self.model_copy(update={"ours": held, "not_run": (*self.not_run, *unrun)})

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    @property
    def heading(self) -> str:
        return f"{self.label}: {self.title}"

    @property
    def anchor(self) -> str:
        """The name that GitHub gives to the heading, for links."""
        return re.sub(r"[^\w\- ]", "", self.heading.lower()).replace(" ", "-")

    @property
    def measured(self) -> str:
        if self.kind == "configuration":
            return "in recipes"
        return ("in part" if self.not_run else "measured") if self.ours else "not run"

    @property
    def contents(self) -> str:
        """What the paper has: of figures how many, and how many of them do not hold."""
        if self.kind != "figures":
            return KINDS[self.kind].replace(";", ",").partition(",")[0]
        cells = [(row, *pair) for row in self.rows for pair in zip(self.names, row, strict=True)]
        marks = [
            self.marks(row, name) for row, name, cell in cells if isinstance(cell, int | float)
        ]
        unsound = sum(map(bool, marks))
        return f"{len(marks)} figures" + (f", {unsound} †" if unsound else "")

    def printed(self) -> Table:
        """Return the paper's table, with a mark at each figure that does not hold."""

        def cell(row: tuple[Cell, ...], value: Cell, column: PrintedColumn) -> str:
            if value is None:
                return DASH
            marks = "".join(f" †{n + 1}" for n in self.marks(row, column.name))
            spec = "," if column.digits is None else f",.{column.digits}f"
            return (value if isinstance(value, str) else formatted(value, spec)) + marks

        return Table(
            tuple(f"{one.name} ({one.unit})" if one.unit else one.name for one in self.columns),
            tuple(
                tuple(cell(row, *pair) for pair in zip(row, self.columns, strict=True))
                for row in self.rows
            ),
            left=tuple(n for n, column in enumerate(self.columns) if column.digits is None),
        )

    def marks(self, row: tuple[Cell, ...], column: str) -> list[int]:
        """Return the numbers of the entries of ``unsound`` that mark a figure."""
        return [index for index, mark in enumerate(self.unsound) if mark.holds(row, column)]


def paper_tables(folder: Path = PAPER_TABLES) -> list[PaperTable]:
    """Return all tables, in the paper's order."""
    tables: dict[str, PaperTable] = {}
    for path in sorted(folder.glob("*.yaml")):
        table = validated(PaperTable, read_recipe_file(path), path.name)
        if table.label in tables:
            raise ConfigError("a label belongs to one file", table.label, f"Rename {path.name}'s.")
        tables[table.label] = table
    return list(tables.values())


def paper_page(results: Path, folder: Path = PAPER_TABLES) -> str:
    """Return the page of all tables in Markdown; a folder of results has our figures."""
    tables = [table.with_results(results) for table in paper_tables(folder)]
    values = {"tables": tables, "results": results, "kinds": KINDS, "markdown": table_markdown}
    return page("paper_tables.md", values) + "\n"
