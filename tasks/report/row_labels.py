"""Rules of a comparison row, and the words by which labels tell cells apart."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from umim_core.config.recipe import Cell
from umim_core.rules.origin import RuleOrigin
from umim_core.rules.ruleset import RULES_SCHEMA
from umim_core.store.artifacts import read_manifest

_GENERIC = ("rules", "checkpoint")  # folders inside a checkpoint, which name nothing


class RowRules(BaseModel):
    """Rules of a row: those of its cell, or as a given directory describes itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str = Field("frequency", description="What made them: frequency, confidence, a list.")
    tau: int | None = Field(description="Count threshold; None where rules have none.")
    min_probability: float | None = Field(
        0.0, description="What every token of a confident span exceeds; None where unknown."
    )
    overlap: str = "greedy"
    containment: str = "drop"

    @classmethod
    def of(cls, cell: Cell) -> Self:
        """Return the rules of a cell: as they are mined, or as the manifest of given ones says."""
        if cell.rules is not None:
            return cls.held(Path(cell.rules)).model_copy(
                update={"source": f"rules {given_name(cell.rules)}", "min_probability": 0.0}
            )
        confident = cell.min_probability if cell.source == "confidence" else 0.0
        return cls(
            source=cell.source,
            tau=cell.tau,
            min_probability=confident,
            overlap=cell.overlap,
            containment=cell.containment,
        )

    @classmethod
    def held(cls, directory: Path) -> Self:
        """Return what the manifest of a rule directory says."""
        origin = RuleOrigin.model_validate(
            read_manifest(directory, kind="rules", schema=RULES_SCHEMA, verify=False)
        )
        return cls(
            source=origin.source,
            tau=origin.tau,
            min_probability=origin.min_probability if origin.source == "confidence" else 0.0,
            overlap=origin.overlap,
            containment=origin.containment,
        )

    @property
    def made_by(self) -> str:
        """Origin of the rules in words."""
        return f"{self.source} {self.min_probability:g}" if self.min_probability else self.source

    def deviations(self) -> list[str]:
        """Return in words where the rules deviate from the paper's form; empty for that."""
        if self.source == "confidence":  # its form in the paper has no filters
            filters = [f for f in (self.overlap, self.containment) if f not in ("none", "keep")]
            return [self.made_by, *filters]
        filters = [f for f in (self.overlap, self.containment) if f not in ("greedy", "drop")]
        return filters if self.source == "frequency" else [self.source, *filters]


def given_name(directory: str) -> str:
    """Return what tells one rule directory from others: the last folder that is not generic."""
    return [part for part in Path(directory).resolve().parts if part not in _GENERIC][-1]


def shown_name(name: str) -> str:
    """Return the last part of a path, for labels; names of hubs and embedded ones stay whole."""
    return Path(name).name if name.startswith(("/", "./", "../", "~")) else name


def cell_words(cell: Cell) -> list[str]:
    """Return what limits the rules, pins the backbone, changes the module, for labels."""
    limits = (
        None if cell.rule_budget is None else f"at most {cell.rule_budget:,} rules",
        None
        if cell.confidence_tokens is None
        else f"asked about {cell.confidence_tokens:,} tokens",
        None if cell.revision is None else f"revision {cell.revision}",
    )
    form = cell.deviations()
    return [*filter(None, limits), *form]
