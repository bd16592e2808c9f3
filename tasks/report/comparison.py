"""One row per (cell, method, setting), and the names that others query."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_serializer,
    model_validator,
)

from umim_core.adaptation.settings import BASE, WT, setting_names
from umim_core.config.recipe import DEFAULT_TASK, Cell
from umim_core.errors import ConfigError
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
        origin = RuleOrigin.of_record(
            read_manifest(directory, kind="rules", schema=RULES_SCHEMA, verify=False)
        )
        made = origin.options
        return cls(
            source=made.source,
            tau=None if made.source == "explicit" else made.tau,
            min_probability=made.min_probability if made.source == "confidence" else 0.0,
            overlap=made.overlap,
            containment=made.containment,
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
        None if cell.spans is None else f"{cell.spans:,} spans",
        None if cell.revision is None else f"revision {cell.revision}",
    )
    form = cell.deviations()
    return [*filter(None, limits), *form]


COMPARISON_PARAMS: Final = (
    *("backbone", "tau", "setting", "rule_source", "min_probability", "overlap", "containment"),
    *("positions", "depth", "kind", "seed"),
)
OWN_METHOD: Final = "umim"
LATER_PARAMS: Final = {
    "rule_budget": None,
    "confidence_tokens": None,
    "revision": None,
    "unit_positions": "compact",
    "method": OWN_METHOD,
    "residual": "none",
    "rule_rows": 0,
    "merge_depth": 0,
    "adapter_rank": 0,
    "spans": None,
}
COMPARISON_METRICS: Final = (
    *("token_reduction", "rules", "top1", "top3", "top10", "topp", "mrr", "kl"),
    *("top1_states", "kl_states", "ppl_base", "ppl_umim", "accuracy_base", "accuracy_umim"),
    *("prefill_speedup", "decode_speedup"),
)
TASK_TR: Final = "token_reduction"  # in a score: realised on the task's own sequences
_ACCURACIES: Final = ("accuracy_base", "accuracy_umim")  # of scores, not of metrics
_HEADLINE: Final = "acc_tok"  # of the embedded task
_PART: Final = "_part_"
_OF_A_TEXT: Final = re.compile(
    r"^(ppl_(base|umim)_ood"
    r"|(token_reduction|top1|top10|mrr|kl|ppl_base|ppl_umim|nats_increase(_se)?)_part)_[a-z0-9_]+$"
)
_RULES: Final = {
    "rule_source": "source",
    "tau": "tau",
    "min_probability": "min_probability",
    "overlap": "overlap",
    "containment": "containment",
}
_CELL: Final = (
    *("backbone", "rule_budget", "confidence_tokens", "revision"),
    *("positions", "depth", "kind", "unit_positions"),
)
# In a file only where they deviate.
_LATER_CELL: Final = ("residual", "rule_rows", "merge_depth", "adapter_rank", "spans")
_FIELDS: Final = {"positions": "module_positions"}  # of a cell, where files have another name


def is_of_a_text(metric: str) -> bool:
    """Return whether a metric is of one text: out of domain, or a part of a mixture."""
    return _OF_A_TEXT.match(metric) is not None


class Measured(BaseModel):
    """A measured value and its standard error; None where that is unknown."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float
    stderr: float | None = Field(default=None, ge=0)


class ComparisonRow(BaseModel):
    """Everything measured for one (cell, method, setting).

    Files hold the form of :meth:`_flat`, with the names of ``COMPARISON_PARAMS``; both are read.

    Attributes:
        cell: What was compared. The rules of a checkpoint that is shipped are given ones.
        rules: Rules of the row, if it has any.
        method: ``umim``.
        setting: Which checkpoint and rules were used (``umim_core.adaptation.settings``).
        seed: Seed of the training run; None where unknown.
        source: Whether this run made the checkpoint or it is shipped with the package.
        metrics: Values by name: ``COMPARISON_METRICS`` without accuracies,
            ``ppl_base_ood_<corpus>`` and ``ppl_umim_ood_<corpus>``, and some of a mixture's
            parts, ``top1_part_<part>`` for one. Ratios, not percent. A missing one was not
            measured.
        errors: Standard errors of metrics by name, where they are known.
        scores: By (task, setting), what was measured by name, the task's headline first; with it
            ``TASK_TR``, 0..1. The setting WT holds every setting of its cell.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cell: Cell
    rules: RowRules | None
    method: str = OWN_METHOD
    setting: str = WT
    seed: int | None = None
    source: Literal["this run", "shipped"] = "this run"
    metrics: dict[str, float | None] = Field(default_factory=dict)
    errors: dict[str, float] = Field(default_factory=dict)
    scores: dict[tuple[str, str], dict[str, Measured]] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _of_file(cls, raw: Any) -> Any:
        return _nested(raw) if isinstance(raw, dict) and "cell" not in raw else raw

    @field_validator("metrics")
    @classmethod
    def _known_names(cls, metrics: dict[str, float | None]) -> dict[str, float | None]:
        for name in metrics:
            known = name in COMPARISON_METRICS and name not in _ACCURACIES
            if not known and not is_of_a_text(name):
                raise ConfigError(
                    "a comparison metric must have a name that others query",
                    name,
                    f"Use one of {', '.join(COMPARISON_METRICS)} or ppl_umim_ood_<corpus>.",
                )
        return metrics

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of a mixture that were measured on their own, in order."""
        names = (name.partition(_PART)[2] for name in self.metrics)
        return tuple(dict.fromkeys(filter(None, names)))

    @property
    def tau(self) -> int | None:
        """Count threshold of the rules; None where there is none."""
        return None if self.rules is None else self.rules.tau

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that were scored, in order."""
        return tuple(dict.fromkeys(task for task, _ in self.scores))

    @property
    def label(self) -> str:
        """Short name for figures, e.g. ``umim-docs-llama, τ 5``."""
        return self.label_with(shown_name(self.cell.backbone))

    @property
    def brief(self) -> str:
        """The label without a shipped checkpoint's form, e.g. ``gpt2, τ 5 (shipped)``."""
        form = [] if self.source == "shipped" else cell_words(self.cell)
        return self._named(shown_name(self.cell.backbone), form)

    def label_with(self, backbone: str) -> str:
        """Return the label with another name of the backbone."""
        return self._named(backbone, cell_words(self.cell))

    def _named(self, backbone: str, form: Sequence[str]) -> str:
        tau = "" if self.tau is None else f", τ {self.tau}"
        words = [] if self.rules is None else [*self.rules.deviations()]
        words += [*form, *(["shipped"] if self.source == "shipped" else [])]
        return f"{backbone}{tau}" + (f" ({', '.join(words)})" if words else "")

    def metric(self, name: str) -> float | None:
        """Return a metric, or None where it is missing, NaN or infinite."""
        value = self.metrics.get(name)
        return value if value is not None and math.isfinite(value) else None

    def measurement(self, name: str) -> dict[str, float | None] | None:
        """Return a metric with its standard error; None where the metric is missing."""
        value = self.metric(name)
        if name == "nats_increase":
            base, ours = self.metric("ppl_base"), self.metric("ppl_umim")
            value = math.log(ours / base) if base and ours else None
        of_a_text, text = name.partition(_PART)[::2]
        error = self.errors.get(name, self.metrics.get(f"{of_a_text}_se{_PART}{text}"))
        return None if value is None else {"mean": value, "stderr": error}

    def settings_scored(self, task: str) -> dict[str, dict[str, Measured]]:
        """Return what was measured on a task, by setting, in the order of the table of settings."""
        order = {name: index for index, name in enumerate(setting_names())}
        by_setting = {setting: score for (of, setting), score in self.scores.items() if of == task}
        return dict(sorted(by_setting.items(), key=lambda item: order.get(item[0], len(order))))

    def score(
        self, setting: str, task: str = DEFAULT_TASK, metric: str | None = None
    ) -> float | None:
        """Return what was measured under a setting, or None where nothing was."""
        measured = self.scores.get((task, setting))
        if not measured:
            return None
        name = next(iter(measured)) if metric is None else metric
        return measured[name].value if name in measured else None

    def params(self) -> dict[str, object]:
        """Return the parameters of the row's MLflow run; ``LATER_PARAMS`` where they deviate."""
        flat = self._described()
        later = {name: flat[name] for name, at in LATER_PARAMS.items() if flat.get(name, at) != at}
        return {name: flat[name] for name in COMPARISON_PARAMS} | later

    def measured(self) -> dict[str, float]:
        """Return the metrics of the row's MLflow run: those that were measured and are finite."""
        values = {name: self.metric(name) for name in self.metrics} | self._named_scores()
        return {name: value for name, value in values.items() if value is not None}

    def _named_scores(self) -> dict[str, float]:
        """Return the scores of the base model and of the row's own setting, as others name them."""
        return {
            f"{score_name(task, metric)}_{suffix}": measured.value
            for suffix, setting in (("base", BASE), ("umim", self.setting))
            for task in self.tasks
            for metric, measured in self.scores.get((task, setting), {}).items()
            if metric != TASK_TR
        }

    def _described(self) -> dict[str, object]:
        empty = {"source": "none", "overlap": "none", "containment": "none"}
        rules = empty if self.rules is None else self.rules.model_dump()
        return {
            **{name: getattr(self.cell, _FIELDS.get(name, name)) for name in _CELL},
            **self.cell.model_dump(mode="json", include=set(_LATER_CELL)),
            **{name: rules.get(field) for name, field in _RULES.items()},
            **{name: getattr(self, name) for name in ("method", "setting", "seed", "source")},
        }

    @model_serializer
    def _flat(self) -> dict[str, object]:
        """Return what files hold; ``accuracies`` are the headlines of the embedded task."""
        accuracies = {
            setting: {
                **measured[next(iter(measured))].model_dump(),
                TASK_TR: measured[TASK_TR].value if TASK_TR in measured else 0.0,
            }
            for setting, measured in self.settings_scored(DEFAULT_TASK).items()
        }
        known = self.metrics | self._named_scores()
        scores = [
            {"task": task, "setting": setting}
            | {"metrics": {name: one.model_dump() for name, one in measured.items()}}
            for (task, setting), measured in self.scores.items()
        ]
        return {
            **self._described(),
            "metrics": {n: v for n, v in known.items() if n in self.metrics or n in _ACCURACIES},
            **({"errors": self.errors} if self.errors else {}),
            "accuracies": accuracies,
            "scores": scores,
        }


def score_name(task: str, metric: str) -> str:
    """Return what a task's metric is called in MLflow, without ``_base`` and ``_umim``."""
    embedded = (task, metric) == (DEFAULT_TASK, _HEADLINE)
    return "accuracy" if embedded else f"{task}_{metric}"


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row that a file holds flat."""
    row = dict(flat)
    rules = RowRules(**{new: row.pop(old) for old, new in _RULES.items() if old in row})
    names = (*_CELL, *_LATER_CELL)
    cell = {_FIELDS.get(name, name): row.pop(name) for name in names if name in row}
    mined = rules.tau is not None and row.get("source") != "shipped"
    if mined and rules.source != "explicit":
        cell |= rules.model_dump(exclude_none=True, exclude_defaults=True)
    else:
        cell["rules"] = rules.source
    row.pop("accuracies", None)  # these and the metrics left out are among the scores
    scores = {
        (score["task"], score["setting"]): score["metrics"] for score in row.pop("scores", [])
    }
    metrics = {n: value for n, value in row.pop("metrics", {}).items() if n not in _ACCURACIES}
    return {**row, "cell": cell, "rules": rules, "metrics": metrics, "scores": scores}
