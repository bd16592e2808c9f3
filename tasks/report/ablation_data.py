"""Results of an ablation, as data that explains itself; ``ablation_page.py`` makes its page."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tasks.report.comparison import ComparisonRow
from tasks.report.report_data import Part
from tasks.run.stage import Artifact


class Budget(Part):
    """Training budget of every cell."""

    steps: int = Field(ge=1)  # of the optimiser, at most
    rows: int = Field(ge=1)  # of the global batch
    tokens: int = Field(ge=1)  # raw, of a row

    @property
    def total(self) -> int:
        """Raw tokens that a cell sees if it takes every step."""
        return self.steps * self.rows * self.tokens


class AblationCell(Part):
    """One cell: what it was, what it was trained with, what was measured."""

    row: ComparisonRow  # with the metrics that the table shows
    rules: dict[int, int]  # number by order
    # Share of rules that share a surrogate with another in a module without positions, 0..1.
    collision_rate: float | None = None
    training: dict[str, float] = Field(default_factory=dict)  # steps, the step kept, seconds
    trained_on: str = ""  # platform
    further: dict[str, float] = Field(default_factory=dict)  # everything else that was measured
    withdrawn: tuple[str, ...] = ()  # metrics that no longer stand; the page marks them

    @property
    def steps(self) -> int | None:
        """Steps taken; None where they were not recorded."""
        return int(self.training["steps"]) if "steps" in self.training else None


class AblationData(Part):
    """A whole ablation."""

    kind: Literal["ablation"] = "ablation"  # tells the file apart from other results
    name: str  # of the recipe; files next to it begin with it
    description: str = ""
    seed: int
    budget: Budget
    evaluation: dict[str, int] = Field(default_factory=dict)  # held-out rows of the measurements
    recipe: dict[str, object] = Field(default_factory=dict)
    machine: dict[str, str] = Field(default_factory=dict)  # that made the table
    versions: dict[str, str] = Field(default_factory=dict)  # all where the cells differ
    cells: tuple[AblationCell, ...] = Field(min_length=1)

    @property
    def rows(self) -> tuple[ComparisonRow, ...]:
        """The cells' rows of the comparison."""
        return tuple(cell.row for cell in self.cells)


def read_ablation(artifact: Artifact) -> AblationData:
    """Return the data of a finished stage."""
    name = str(artifact.manifest()["config"]["recipe"]["name"])
    return AblationData.model_validate_json((artifact.path / f"{name}.json").read_text("utf-8"))
