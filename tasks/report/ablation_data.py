"""Results of an ablation, as data that explains itself; ``ablation.py`` turns it into pages."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tasks.report.comparison import ComparisonRow
from tasks.run.stage import Artifact


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Budget(_Part):
    """Training budget of every cell.

    Attributes:
        steps: Optimiser steps at most.
        rows: Rows of the global batch.
        tokens: Raw tokens of a row.
    """

    steps: int = Field(ge=1)
    rows: int = Field(ge=1)
    tokens: int = Field(ge=1)

    @property
    def total(self) -> int:
        """Raw tokens that a cell sees if it takes every step."""
        return self.steps * self.rows * self.tokens


class AblationCell(_Part):
    """One cell: what it was, what it was trained with, what was measured.

    Attributes:
        row: The cell's row of the comparison, with the metrics that the table shows.
        rules: Number of rules by order.
        collision_rate: Share of rules that share a surrogate with another in a module without
            positions, 0..1.
        training: What the training recorded: its steps, the step that was kept, seconds.
        trained_on: Platform of the training.
        further: Everything else that was measured.
        withdrawn: Metrics whose figures no longer stand; the page marks them and says why.
    """

    row: ComparisonRow
    rules: dict[int, int]
    collision_rate: float | None = None
    training: dict[str, float] = Field(default_factory=dict)
    trained_on: str = ""
    further: dict[str, float] = Field(default_factory=dict)
    withdrawn: tuple[str, ...] = ()

    @property
    def steps(self) -> int | None:
        """Steps taken; None where they were not recorded."""
        return int(self.training["steps"]) if "steps" in self.training else None


class AblationData(_Part):
    """A whole ablation.

    Attributes:
        kind: Tells the file apart from other results.
        name: Name of the recipe; files next to it begin with it.
        description: Of the recipe.
        seed: Of every training.
        budget: What every cell may train on.
        evaluation: Held-out rows of the measurements.
        recipe: The validated recipe.
        machine: Facts of the machine that made the table, in the order to be shown.
        versions: Libraries of the trainings; every version where the cells differ.
        cells: In the order of the recipe.
    """

    kind: Literal["ablation"] = "ablation"
    name: str
    description: str = ""
    seed: int
    budget: Budget
    evaluation: dict[str, int] = Field(default_factory=dict)
    recipe: dict[str, object] = Field(default_factory=dict)
    machine: dict[str, str] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    cells: tuple[AblationCell, ...] = Field(min_length=1)

    @property
    def rows(self) -> tuple[ComparisonRow, ...]:
        """The cells' rows of the comparison."""
        return tuple(cell.row for cell in self.cells)


def read_ablation(artifact: Artifact) -> AblationData:
    """Return the data of a finished stage."""
    name = str(artifact.manifest()["config"]["recipe"]["name"])
    return AblationData.model_validate_json((artifact.path / f"{name}.json").read_text("utf-8"))
