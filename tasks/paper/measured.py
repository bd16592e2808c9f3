"""Our figures for a table of the paper: the result file they lie in, its rows and its columns.

Rows are a path into the results and columns are lines of a template, both as
``tasks/report/render.py`` reads them, so a new result is an entry of data and no code. A row of a
table recipe's ``table.json`` is a task under a setting, one of ``adaptation.json`` a point of its
curves; limits are stated once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from tasks.report.render import data_table, walk
from tasks.report.tables import Table
from umim_core.config.model_base import Model
from umim_core.errors import ConfigError


class Measured(Model):
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

    @field_validator("columns")
    @classmethod
    def _cells_have_fields(cls, columns: str) -> str:
        for line in columns.splitlines():
            if "|" not in line or re.search(r"(?<!\{)\{(?![{%])", line):
                raise ValueError(f"a column is `heading | {{{{ field }}}}`, got {line!r}")
        return columns

    @property
    def measured_by(self) -> str | None:
        """Command that measures the figures; None where the result file must be there."""
        run = None if self.recipe is None else f"python -m flows run {self.recipe}"
        return self.command or run

    def awaited(self, folder: Path) -> bool:
        """Return whether the figures can be measured and no committed result has them yet."""
        return self.measured_by is not None and not (folder / self.file).is_file()

    @property
    def backbones(self) -> str:
        """The model in short, as a list of all tables names it."""
        return re.sub(r" \([^)]*\)", "", self.model).removeprefix("the embedded ")

    def table(self, folder: Path) -> Table:
        """Return the figures as a table; a task that was not run has no row next to others.

        Raises:
            ConfigError: If the file is missing, or no row is left.
            jinja2.UndefinedError: If it lacks a field that a column shows.
        """
        _, rows = self._read(folder)
        run = [row for row in rows if "not_run" not in row]
        return data_table(self.columns, run or rows)

    def limits(self, folder: Path) -> list[str]:
        """Return paragraphs on what a recipe's figures are of, and on tasks not run.

        Raises:
            ConfigError: As :meth:`table`.
        """
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
        rows = [
            self._worded(_undiffering(row) if row.get("setting") == first else row)
            for row in walk(results, self.rows)
            if self._shown(row)
        ]
        if not rows:
            raise ConfigError(
                f"{self.file} must have rows of {self.rows}", self.where, "Correct the entry."
            )
        return results, rows

    def _shown(self, row: dict[str, Any]) -> bool:
        return all(
            _field_or_none(row, name) in values for name, values in self.where.items()
        ) and not any(_field(row, name) in values for name, values in self.without.items())

    def _worded(self, row: dict[str, Any]) -> dict[str, Any]:
        worded = {
            f"{name}_word": words.get(str(_field(row, name)), str(_field(row, name)))
            for name, words in self.words.items()
        }
        return row | worded


def _amount(row: Mapping[str, Any]) -> str:
    """Return how many questions a task has, and how many answers of what length."""
    amount = f"{row['questions']:,} questions"
    if "new_tokens" not in row:
        return amount
    answers = "one answer" if row["answers"] == 1 else f"{row['answers']} answers each"
    return f"{amount}, {answers} of at most {row['new_tokens']:,} tokens"


def _undiffering(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the first setting without its differences to itself."""
    return {name: value for name, value in row.items() if not name.endswith("_difference")}


def _field(row: dict[str, Any], name: str) -> Any:
    value: Any = row
    for part in name.split("."):
        value = value[part]
    return value


def _field_or_none(row: dict[str, Any], name: str) -> Any:
    try:
        return _field(row, name)
    except KeyError:
        return None
