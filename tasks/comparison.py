"""One row per (backbone, threshold, setting): the names others query, and the table people read."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from rich.console import Console
from rich.table import Table

from umim_core.errors import ConfigError
from umim_core.merging.policies import deviations

COMPARISON_PARAMS: Final = (
    "backbone",
    "tau",
    "setting",
    "overlap",
    "containment",
    "positions",
    "depth",
    "kind",
    "seed",
)
COMPARISON_METRICS: Final = (
    "token_reduction",
    "top1",
    "top3",
    "top10",
    "topp",
    "mrr",
    "kl",
    "ppl_base",
    "ppl_umim",
    "accuracy_base",
    "accuracy_umim",
    "prefill_speedup",
    "decode_speedup",
)
SETTINGS: Final = ("base", "WT", "WT + Rules", "WT + FT", "WT + DPO", "Task-Adapted")
DASH: Final = "–"
_OUT_OF_DOMAIN = re.compile(r"^ppl_(base|umim)_ood_[a-z0-9_]+$")


class Accuracy(BaseModel):
    """Accuracy on the task under one setting.

    Attributes:
        value: Share of questions answered rightly, 0..1.
        stderr: Standard error of ``value``.
        token_reduction: Realised TR on the task's own sequences, 0..1; 0 for the base model.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float = Field(ge=0, le=1)
    stderr: float | None = Field(default=None, ge=0)
    token_reduction: float = Field(default=0.0, ge=0, lt=1)


class ComparisonRow(BaseModel):
    """Everything measured for one (backbone, threshold, setting).

    Attributes:
        backbone: Name of the frozen model.
        tau: Count threshold of the rules; None where rules have none.
        setting: Which checkpoint and rules were used (``SETTINGS``).
        overlap: Overlap policy of the rules.
        containment: Containment policy of the rules.
        positions: Offsets inside a span as the merge module sees them.
        depth: Layers of the merge module before it pools.
        kind: How the merge module makes one embedding of a span.
        seed: Seed of the training run; None where unknown.
        source: Whether this run made the checkpoint or it is shipped with the package.
        metrics: Values by name: ``COMPARISON_METRICS``, ``ppl_base_ood_<corpus>`` and
            ``ppl_umim_ood_<corpus>``. Ratios, not percent. A missing one was not measured.
        accuracies: Task accuracy by setting.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    backbone: str
    tau: int | None
    setting: str = "WT"
    overlap: str = "greedy"
    containment: str = "drop"
    positions: str = "none"
    depth: int = 1
    kind: str = "attention"
    seed: int | None = None
    source: Literal["this run", "shipped"] = "this run"
    metrics: dict[str, float | None] = Field(default_factory=dict)
    accuracies: dict[str, Accuracy] = Field(default_factory=dict)

    @field_validator("metrics")
    @classmethod
    def _known_names(cls, metrics: dict[str, float | None]) -> dict[str, float | None]:
        for name in metrics:
            if name not in COMPARISON_METRICS and not _OUT_OF_DOMAIN.match(name):
                raise ConfigError(
                    "a comparison metric must have a name that others query",
                    name,
                    f"Use one of {', '.join(COMPARISON_METRICS)} or ppl_umim_ood_<corpus>.",
                )
        return metrics

    @property
    def label(self) -> str:
        """Short name for figures, e.g. ``umim-docs-llama, τ 5``."""
        tau = "" if self.tau is None else f", τ {self.tau}"
        forms = [f for f in (self.overlap, self.containment) if f not in ("greedy", "drop")]
        forms += deviations(self.positions, self.depth, self.kind)
        if self.source == "shipped":
            forms.append("shipped")
        return f"{self.backbone}{tau}" + (f" ({', '.join(forms)})" if forms else "")

    def metric(self, name: str) -> float | None:
        """Return a metric, or None where it is missing, NaN or infinite."""
        value = self.metrics.get(name)
        return value if value is not None and math.isfinite(value) else None

    def accuracy(self, setting: str) -> float | None:
        """Return the task accuracy under a setting, 0..1, or None where it was not measured."""
        if setting in self.accuracies:
            return self.accuracies[setting].value
        if setting == "base":
            return self.metric("accuracy_base")
        return self.metric("accuracy_umim") if setting == self.setting else None

    def params(self) -> dict[str, object]:
        """Return the parameters of the row's MLflow run."""
        return {name: getattr(self, name) for name in COMPARISON_PARAMS}

    def measured(self) -> dict[str, float]:
        """Return the metrics of the row's MLflow run: those that were measured and are finite."""
        values = {name: self.metric(name) for name in self.metrics}
        found = {name: value for name, value in values.items() if value is not None}
        for name, setting in (("accuracy_base", "base"), ("accuracy_umim", self.setting)):
            value = self.accuracy(setting)
            if value is not None:
                found[name] = value
        return found


HEADINGS: Final = (
    "backbone",
    "τ",
    "setting",
    "TR %",
    "Top-1",
    "PPL base",
    "PPL UMIM",
    "acc. base",
    "acc. WT",
    "acc. adapted",
    "prefill ×",
)
_LEFT: Final = (0, 2)


def table_cells(row: ComparisonRow) -> tuple[str, ...]:
    """Return a row's cells in the order of ``HEADINGS``, a dash where nothing was measured."""
    return (
        row.backbone + (" *" if row.source == "shipped" else ""),
        DASH if row.tau is None else str(row.tau),
        row.setting,
        shown(row.metric("token_reduction"), 1, scale=100),
        shown(row.metric("top1"), 3),
        shown(row.metric("ppl_base"), 2),
        shown(row.metric("ppl_umim"), 2),
        shown(row.accuracy("base"), 1, scale=100),
        shown(row.accuracy("WT") if row.setting == "WT" else None, 1, scale=100),
        shown(row.accuracy(_adapted(row)), 1, scale=100),
        shown(row.metric("prefill_speedup"), 2),
    )


def _adapted(row: ComparisonRow) -> str:
    """Return which accuracy the last column shows: the final setting's, or the row's own."""
    return "Task-Adapted" if row.setting == "WT" else row.setting


def shown(value: float | None, digits: int, *, scale: float = 1.0) -> str:
    """Format a number, or return a dash for None, NaN and infinities."""
    if value is None or not math.isfinite(value):
        return DASH
    return f"{value * scale:,.{digits}f}"


def notes(rows: Sequence[ComparisonRow]) -> str:
    """Return the line below the table that explains its columns."""
    text = (
        "TR: tokens removed by merging, realised. Top-1: agreement with the base model. "
        "PPL: per raw token, in-domain. acc.: task accuracy in %. prefill ×: base time / UMIM time."
    )
    return text + (" *: shipped checkpoint." if any(r.source == "shipped" for r in rows) else "")


def comparison_table(rows: Sequence[ComparisonRow], width: int | None = None) -> str:
    """Return the table for a terminal.

    Args:
        rows: The rows, in the order to be shown.
        width: Columns of the terminal; None gives the table the room it needs.

    Returns:
        Text without colour codes, ending in a newline.
    """
    table = Table(box=None, pad_edge=False, header_style="")
    for index, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if index in _LEFT else "right", no_wrap=True)
    for row in rows:
        table.add_row(*table_cells(row))
    console = Console(file=io.StringIO(), width=width or 140, color_system=None)
    console.print(table)
    console.print(notes(rows), highlight=False)
    printed = console.file
    assert isinstance(printed, io.StringIO)  # noqa: S101  made so three lines above
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines()) + "\n"


def comparison_markdown(rows: Sequence[ComparisonRow]) -> str:
    """Return the same table as GitHub-flavoured markdown, notes below it."""
    rule = [":--" if i in _LEFT else "--:" for i in range(len(HEADINGS))]
    cells = [[c.replace("|", "\\|").replace("*", "\\*") for c in table_cells(r)] for r in rows]
    lines = [f"| {' | '.join(line)} |" for line in [list(HEADINGS), rule, *cells]]
    return "\n".join([*lines, "", notes(rows).replace("*", "\\*"), ""])
