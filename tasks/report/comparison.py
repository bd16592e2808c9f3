"""One row per (backbone, threshold, setting), and the names that others query."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from umim_core.config.form import deviations
from umim_core.errors import ConfigError

COMPARISON_PARAMS: Final = (
    "backbone",
    "tau",
    "setting",
    "rule_source",
    "min_probability",
    "overlap",
    "containment",
    "positions",
    "depth",
    "kind",
    "seed",
)
LATER_PARAMS: Final = ("rule_budget", "confidence_tokens", "revision", "unit_positions")
COMPARISON_METRICS: Final = (
    "token_reduction",
    "rules",
    "top1",
    "top3",
    "top10",
    "topp",
    "mrr",
    "kl",
    "top1_states",
    "kl_states",
    "ppl_base",
    "ppl_umim",
    "accuracy_base",
    "accuracy_umim",
    "prefill_speedup",
    "decode_speedup",
)
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


def rule_words(
    source: str, min_probability: float | None, overlap: str, containment: str
) -> list[str]:
    """Return in words where rules deviate from the paper's form, for labels; empty for that."""
    if source == "confidence":  # its form in the paper has no filters
        filters = [f for f in (overlap, containment) if f not in ("none", "keep")]
        return [made_by(source, min_probability), *filters]
    filters = [f for f in (overlap, containment) if f not in ("greedy", "drop")]
    return filters if source == "frequency" else [source, *filters]


def made_by(source: str, min_probability: float | None) -> str:
    """Return in words what made the rules."""
    return f"{source} {min_probability:g}" if min_probability else source


def shown_name(name: str) -> str:
    """Return the last part of a path, for labels; names of hubs and embedded ones stay whole."""
    return Path(name).name if name.startswith(("/", "./", "../", "~")) else name


def limit_words(
    rule_budget: int | None, confidence_tokens: int | None, revision: str | None
) -> list[str]:
    """Return in words what limits the rules and pins the backbone, for labels; often empty."""
    words = (
        None if rule_budget is None else f"at most {rule_budget:,} rules",
        None if confidence_tokens is None else f"asked about {confidence_tokens:,} tokens",
        None if revision is None else f"revision {revision}",
    )
    return [word for word in words if word is not None]


class ComparisonRow(BaseModel):
    """Everything measured for one (backbone, threshold, setting).

    Attributes:
        backbone: Name of the frozen model.
        tau: Count threshold of the rules; None where rules have none.
        setting: Which checkpoint and rules were used (``umim_core.adaptation.settings``).
        rule_source: What made the rules: ``frequency``, ``confidence`` or an ``explicit`` list.
        min_probability: What every token of a confident span exceeds; 0 asks for nothing, None
            where unknown.
        overlap: Overlap policy of the rules.
        containment: Containment policy of the rules.
        rule_budget: Most rules; None sets no limit.
        confidence_tokens: Tokens that the backbone was asked about; None where all were, or none.
        revision: Commit of the backbone; None where none was named.
        positions: Offsets inside a span as the merge module sees them.
        depth: Layers of the merge module before it pools.
        kind: How the merge module makes one embedding of a span.
        unit_positions: Positions of units in the backbone.
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
    rule_source: str = "frequency"
    min_probability: float | None = 0.0
    overlap: str = "greedy"
    containment: str = "drop"
    rule_budget: int | None = None
    confidence_tokens: int | None = None
    revision: str | None = None
    positions: str = "none"
    depth: int = 1
    kind: str = "attention"
    unit_positions: str = "compact"
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
        forms = rule_words(self.rule_source, self.min_probability, self.overlap, self.containment)
        forms += limit_words(self.rule_budget, self.confidence_tokens, self.revision)
        forms += deviations(self.positions, self.depth, self.kind, self.unit_positions)
        if self.source == "shipped":
            forms.append("shipped")
        return f"{shown_name(self.backbone)}{tau}" + (f" ({', '.join(forms)})" if forms else "")

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
        """Return the parameters of the row's MLflow run; ``LATER_PARAMS`` where they deviate."""
        fields = ComparisonRow.model_fields
        later = {name: getattr(self, name) for name in LATER_PARAMS}
        return {name: getattr(self, name) for name in COMPARISON_PARAMS} | {
            name: value for name, value in later.items() if value != fields[name].default
        }

    def measured(self) -> dict[str, float]:
        """Return the metrics of the row's MLflow run: those that were measured and are finite."""
        values = {name: self.metric(name) for name in self.metrics}
        found = {name: value for name, value in values.items() if value is not None}
        for name, setting in (("accuracy_base", "base"), ("accuracy_umim", self.setting)):
            value = self.accuracy(setting)
            if value is not None:
                found[name] = value
        return found
