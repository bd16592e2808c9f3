"""The comparison: a row per cell and setting, of the artifacts that measured it; its tables."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    field_serializer,
    field_validator,
)

from tasks.report.render import Table, environment, file_table, fitted
from tasks.run.stage import Artifact
from tasks.tracking.compare_view import ADAPTATION_SOURCE
from umim_core.adaptation.settings import BASE, WT, find_setting, measures
from umim_core.checkpoint.checkpoint_files import named_config, read_config, resolve_checkpoint
from umim_core.checkpoint.checkpoint_index import own_name
from umim_core.config.adaptation_recipe import AdaptationRecipe
from umim_core.config.form import ModuleForm, Positions
from umim_core.config.recipe import DEFAULT_TASK, Cell, Recipe
from umim_core.errors import ConfigError, require
from umim_core.rules.ruleset import RULES_SCHEMA, RuleOrigin
from umim_core.store.artifacts import json_digest, read_json, read_manifest
from umim_core.task_sets.spec import TASKS

if TYPE_CHECKING:
    from tasks.run.pipeline import PipelineRun

_GENERIC: Final = ("rules", "checkpoint")  # folders inside a checkpoint, which name nothing
COMPARISON_PARAMS: Final = (
    *("backbone", "tau", "setting", "rule_source", "min_probability", "overlap", "containment"),
    *("positions", "depth", "kind", "seed"),
)
_NO_PARAMS: Final = ("module_positions", "source", "metrics", "errors", "scores")
COMPARISON_METRICS: Final = (
    *("token_reduction", "rules", "top1", "top3", "top10", "topp", "mrr", "kl"),
    *("top1_states", "kl_states", "ppl_base", "ppl_umim", "accuracy_base", "accuracy_umim"),
    *("prefill_speedup", "decode_speedup"),
)
TEXT_ROWS: Final = ("alignment_rows", "perplexity_rows")  # metrics: how many were measured
TASK_TR: Final = "token_reduction"  # in a score: realised on the task's own sequences
_QUESTIONS: Final = "questions"  # in a score: how many were asked
_OF_A_POINT: Final = (
    *("rules", "token_reduction", "input_reduction", "accuracy", "accuracy_se", "difference"),
    *("difference_se", "gained", "lost", "margin", "margin_difference", "margin_difference_se"),
)
_HEADLINE: Final = "acc_tok"  # of the embedded task
_PART: Final = "_part_"
_OF_A_TEXT: Final = re.compile(  # a metric out of domain, or of a part of a mixture
    r"^(ppl_(base|umim)_ood"
    r"|(token_reduction|top1|top10|mrr|kl|ppl_base|ppl_umim|nats_increase(_se)?)_part)_[a-z0-9_]+$"
)


def given_name(directory: str) -> str:
    """Return what tells one rule directory from others: the last folder that is not generic."""
    return [part for part in Path(directory).resolve().parts if part not in _GENERIC][-1]


def shown_name(name: str) -> str:
    """Return the last part of a path, for labels; names of hubs and embedded ones stay whole."""
    return Path(name).name if name.startswith(("/", "./", "../", "~")) else name


class Measured(BaseModel):
    """A measured value and its standard error; None where that is unknown."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float
    stderr: float | None = Field(default=None, ge=0)


class ComparisonRow(ModuleForm):
    """Everything measured for one cell and setting, as files hold it.

    Attributes:
        rule_source: What made the rules: frequency, confidence, a list, or a directory by name.
        min_probability: What every token of a confident span exceeds; None where unknown.
        setting: Which checkpoint and rules were used (``umim_core.adaptation.settings``).
        metrics: Values by name: ``COMPARISON_METRICS`` without accuracies, ``TEXT_ROWS``,
            ``ppl_base_ood_<corpus>`` and ``ppl_umim_ood_<corpus>``, and some of a mixture's
            parts, ``top1_part_<part>`` for one. Ratios, not percent. A missing one was not
            measured.
        errors: Standard errors of metrics by name, where they are known.
        scores: By (task, setting), what was measured by name, the task's headline first; with it
            ``TASK_TR``, 0..1, and ``questions``. The setting WT holds every setting of its cell.
    """

    model_config = ConfigDict(allow_inf_nan=True, validate_by_name=True, serialize_by_alias=True)

    module_positions: Positions = Field(default="none", alias="positions")
    backbone: str
    revision: str | None = None
    rule_source: str = "frequency"
    tau: int | None = None
    min_probability: float | None = 0.0
    overlap: str = "greedy"
    containment: str = "drop"
    confidence_tokens: int | None = None
    spans: int | None = None
    setting: str = WT
    seed: int | None = None
    source: Literal["this run", "shipped"] = "this run"
    metrics: dict[str, float | None] = Field(default_factory=dict)
    errors: dict[str, float] = Field(default_factory=dict)
    scores: dict[tuple[str, str], dict[str, Measured]] = Field(default_factory=dict)

    @field_validator("scores", mode="before")
    @classmethod
    def _by_setting(cls, scores: Any) -> Any:
        if isinstance(scores, dict):
            return scores
        return {(score["task"], score["setting"]): score["metrics"] for score in scores}

    @field_serializer("scores")
    def _listed(self, scores: dict[tuple[str, str], dict[str, Measured]]) -> list[dict[str, Any]]:
        return [
            {"task": task, "setting": setting}
            | {"metrics": {name: one.model_dump() for name, one in measured.items()}}
            for (task, setting), measured in scores.items()
        ]

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of a mixture that were measured on their own, in order."""
        names = (name.partition(_PART)[2] for name in self.metrics)
        return tuple(dict.fromkeys(filter(None, names)))

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(task for task, _ in self.scores))

    @property
    def model(self) -> str:
        return shown_name(self.backbone)

    @property
    def rules_by(self) -> str:
        sure = f" {self.min_probability:g}" if self.min_probability else ""
        return f"{self.rule_source}{sure}"

    def _rule_deviations(self) -> list[str]:
        """Return in words where the rules deviate from the paper's form."""
        confident = self.rule_source == "confidence"  # its form in the paper has no filters
        usual = ("none", "keep") if confident else ("greedy", "drop")
        filters = [f for f in (self.overlap, self.containment) if f not in usual]
        return filters if self.rule_source == "frequency" else [self.rules_by, *filters]

    @property
    def label(self) -> str:
        """Short name for figures, e.g. ``umim-docs-llama, τ 5``."""
        return self.model + ("" if self.tau is None else f", τ {self.tau}") + self.in_brackets

    @property
    def in_brackets(self) -> str:
        """What else tells the row from others, as labels end."""
        words = [*self._rule_deviations(), *cell_words(self)]
        words += ["shipped"] if self.source == "shipped" else []
        return f" ({', '.join(words)})" if words else ""

    @property
    def form_in_short(self) -> str:
        """The most that the form adds to the paper's, in a word or two."""
        added = {"inside": self.merge_depth, "adapters": self.adapter_rank}
        added |= {"rule rows": self.rule_rows, "ours": len(self.deviations())}
        return next((word for word, size in added.items() if size), "paper's")

    def metric(self, name: str) -> float | None:
        """Return a metric, or None where it is missing, NaN or infinite."""
        value = self.metrics.get(name)
        return value if value is not None and math.isfinite(value) else None

    @property
    def ppl_ratio(self) -> float | None:
        """UMIM's perplexity over the base model's; None where one is missing."""
        base, ours = self.metric("ppl_base"), self.metric("ppl_umim")
        return ours / base if base and ours else None

    def measurement(self, name: str) -> dict[str, float | None] | None:
        value = self.metric(name)
        if name == "nats_increase":
            value = None if self.ppl_ratio is None else math.log(self.ppl_ratio)
        of_a_text, text = name.partition(_PART)[::2]
        error = self.errors.get(name, self.metrics.get(f"{of_a_text}_se{_PART}{text}"))
        return None if value is None else {"mean": value, "stderr": error}

    def score(
        self, setting: str, task: str = DEFAULT_TASK, metric: str | None = None
    ) -> float | None:
        """Return what was measured under a setting, or None where nothing was."""
        found = self.scores.get((task, setting), {})
        one = found.get(metric or next(iter(found), ""))
        return None if one is None else one.value

    def accuracy(self, setting: str, task: str) -> dict[str, float | None] | None:
        """Return a task's headline as tables show a mean with its standard error."""
        found = next(iter(self.scores.get((task, setting), {}).values()), None)
        return None if found is None else {"mean": found.value, "stderr": found.stderr}

    def accuracies(self) -> tuple[float, float] | None:
        """Return the first task's headline of the base model and under the row's setting."""
        task = next(iter(self.tasks), "")
        base, merged = (self.score(setting, task) for setting in (BASE, self.setting))
        return None if base is None or merged is None else (base, merged)

    def params(self) -> dict[str, object]:
        """Return the parameters of the row's MLflow run, further ones where they deviate."""
        values = dict(self) | {"positions": self.module_positions}
        later = [
            name
            for name, field in type(self).model_fields.items()
            if name not in (*COMPARISON_PARAMS, *_NO_PARAMS) and values[name] != field.default
        ]
        return {name: values[name] for name in (*COMPARISON_PARAMS, *later)}

    def measured(self) -> dict[str, float]:
        """Return the metrics of the row's MLflow run: those that were measured and are finite.

        Scores are those of the base model and of the row's own setting.
        """
        values = {name: self.metric(name) for name in self.metrics}
        values |= {
            f"{score_name(task, metric)}_{suffix}": measured.value
            for suffix, setting in (("base", BASE), ("umim", self.setting))
            for task in self.tasks
            for metric, measured in self.scores.get((task, setting), {}).items()
            if metric not in (TASK_TR, _QUESTIONS)
        }
        return {name: value for name, value in values.items() if value is not None}


def score_name(task: str, metric: str) -> str:
    """Return what a task's metric is called in MLflow, without ``_base`` and ``_umim``."""
    embedded = (task, metric) == (DEFAULT_TASK, _HEADLINE)
    return "accuracy" if embedded else f"{task}_{metric}"


def cell_words(cell: Cell | ComparisonRow) -> list[str]:
    """Return what limits the rules, pins the backbone, changes the module, for labels."""
    limits = {
        "asked about {:,} tokens": cell.confidence_tokens,
        "{:,} spans": cell.spans,
        "revision {}": cell.revision,
    }
    words = [text.format(value) for text, value in limits.items() if value is not None]
    return [*words, *cell.deviations()]


def cell_row(cell: Cell, **measured: Any) -> ComparisonRow:
    """Return the row of a cell; given rules are described by their manifest."""
    names = ("backbone", "revision", "confidence_tokens", "spans")
    fields = {name: getattr(cell, name) for name in names} | cell.form()
    if cell.rules is not None:
        rules = held_rules(Path(cell.rules)) | {"min_probability": 0.0}
        rules["rule_source"] = f"rules {given_name(cell.rules)}"
    else:
        rules = {name: getattr(cell, name) for name in ("tau", "overlap", "containment")}
        rules |= {"rule_source": cell.source, "min_probability": 0.0}
        if cell.source == "confidence":
            rules["min_probability"] = cell.min_probability
    return ComparisonRow(**{**fields, **rules, **measured})


def held_rules(directory: Path) -> dict[str, Any]:
    """Return what the manifest of a rule directory says, as a row holds it."""
    manifest = read_manifest(directory, kind="rules", schema=RULES_SCHEMA, verify=False)
    made = RuleOrigin.of_record(manifest).options
    return {
        "rule_source": made.source,
        "tau": None if made.source == "explicit" else made.tau,
        "min_probability": made.min_probability if made.source == "confidence" else 0.0,
        "overlap": made.overlap,
        "containment": made.containment,
    }


@dataclass
class Result:
    """Everything that a cell led to, or that was measured of a checkpoint which is shipped."""

    cell: Cell | None  # None for a shipped one
    tokenized: Artifact  # the corpus in the ids of its tokenizer
    filtered: Artifact | None = None  # the rules of the cell
    settings: dict[str, Artifact] = field(default_factory=dict)  # what was trained
    evaluations: dict[str, Artifact] = field(default_factory=dict)
    scores: dict[tuple[str, str], Artifact] = field(default_factory=dict)  # (task, setting)
    benchmark: Artifact | None = None
    name: str = ""  # of a shipped one
    leads: bool = False  # whether it is the headline of the comparison

    @property
    def checkpoints(self) -> dict[str, Path | str]:
        """By setting; a shipped one has the setting that it notes, WT where it notes none."""
        if self.cell is not None:
            return {name: made.path / "checkpoint" for name, made in self.settings.items()}
        training = named_config(self.name).training
        return {find_setting(str(training.get("setting", WT))).name: self.name}

    @property
    def evaluated(self) -> list[str]:
        """The settings that were measured, in the order of training; parts end in any order."""
        return [name for name in self.checkpoints if name in self.evaluations]

    @property
    def called(self) -> str:
        """What it is called on Prefect's pages."""
        return f"{self.name} (shipped)" if self.cell is None else cell_label(self.cell)

    @property
    def label(self) -> str:
        """What it is called in tables and figures."""
        shipped = f"{shown_name(self.name)} (shipped)"
        return shipped if self.cell is None else cell_row(self.cell).label


@dataclass
class CellResult(Result):
    cell: Cell
    filtered: Artifact


def comparison_rows(results: Sequence[Result], seed: int) -> list[ComparisonRow]:
    return [_row(result, setting, seed) for result in results for setting in result.evaluated]


def _row(result: Result, setting: str, seed: int) -> ComparisonRow:
    directory = resolve_checkpoint(result.checkpoints[setting])
    values: Mapping[str, float] = result.evaluations[setting].metrics
    shown: dict[str, float | None] = {
        name: value
        for name, value in values.items()
        if name in (*COMPARISON_METRICS, *TEXT_ROWS) or _OF_A_TEXT.match(name)
    }
    if result.benchmark is not None and measures(setting, "speed"):
        timed = result.benchmark.metrics
        shown |= {name: timed.get(name) for name in ("prefill_speedup", "decode_speedup")}
    shown["rules"] = float(sum(rule_counts(directory / "rules").values()))
    errors = {name: values.get(f"{name}_se") for name in (*COMPARISON_METRICS, "nats_increase")}
    order = [*result.checkpoints, BASE].index
    measured = {
        "setting": setting,
        "metrics": shown,
        "errors": {name: error for name, error in errors.items() if error is not None},
        "scores": {  # WT shows those of every setting
            (task, scored_in): _score(TASKS.find(task).metrics, scored.metrics)
            for (task, scored_in), scored in sorted(
                result.scores.items(), key=lambda item: order(item[0][1])
            )
            if setting == WT or scored_in in (BASE, setting)
        },
    }
    if result.cell is not None:
        return cell_row(result.cell, seed=seed, **measured)
    config = read_config(directory)
    made = held_rules(directory / "rules") | config.form() | measured
    trained_with = config.training.get("seed")
    known = trained_with if isinstance(trained_with, int) else None
    return ComparisonRow(backbone=config.backbone, seed=known, source="shipped", **made)


def rule_counts(rules: Path) -> dict[int, int]:
    manifest: dict[str, Any] = read_manifest(rules, kind="rules", schema=RULES_SCHEMA, verify=False)
    return {int(n): int(count) for n, count in manifest["rules"].items()}


def _score(names: Sequence[str], metrics: Mapping[str, float]) -> dict[str, Measured]:
    """Return the metrics of a task, with the token reduction where the task merges."""
    score = {
        name: Measured(value=metrics[name], stderr=metrics.get(f"{name}_stderr")) for name in names
    }
    reduction = metrics.get("context_token_reduction", metrics["token_reduction"])
    others = {TASK_TR: reduction, _QUESTIONS: metrics["questions"]}
    return score | {name: Measured(value=value) for name, value in others.items()}


def cell_label(cell: Cell) -> str:
    sure = f"confidence {cell.min_probability:g} " if cell.source == "confidence" else ""
    rules_label = f"{sure}tau {cell.tau} {cell.overlap}+{cell.containment}"
    if cell.rules is not None:
        rules_label = f"rules {given_name(cell.rules)}"
    rules = f"{short_name(cell.backbone)} {rules_label}"
    return ", ".join([rules, *cell_words(cell)])


def require_own_names(recipe: str, cells: Sequence[Cell]) -> None:
    """Refuse cells whose checkpoints would get one name."""
    rule = "every cell of a recipe needs a name of its own on the command line"
    remedy = "Leave one out, or name its backbone by a path with another last part."
    names = Counter(own_name(recipe, cell_label(cell)) for cell in cells)
    name, times = names.most_common(1)[0]
    require(times == 1, ConfigError, rule, f"{name} twice", remedy)


def short_name(backbone: str) -> str:
    """Return a name that MLflow's plots can show: they cut labels after ten characters."""
    return backbone.rstrip("/").rpartition("/")[2].removeprefix("umim-")


def run_label(row: ComparisonRow) -> str:
    """Return what a row's run is called in MLflow's lists, which show its beginning alone."""
    tau = "" if row.tau is None else f" τ {row.tau}"
    return f"{row.setting}{tau} {short_name(row.backbone)}{row.in_brackets}"


def record_comparison(run: PipelineRun[Recipe], rows: list[ComparisonRow]) -> None:
    """Write each row as one flat MLflow run; equal rows are found, not added.

    The last row comes first: MLflow lists what is new above.
    """
    for row in reversed(rows):
        key = json_digest([run.key, row.source, row.params(), row.measured()])
        params = {**row.params(), "model": short_name(row.backbone)}
        run.tracker.comparison_run(
            run.key, key, run_label(row), params, row.measured(), source=row.source
        )


def record_adaptation(run: PipelineRun[AdaptationRecipe], adaptation: Artifact) -> None:
    """Write every model of the curves as a row of its own, the base models first."""
    body: Any = read_json(adaptation.path / "adaptation.json")
    for place in body["backbones"]:
        model = short_name(place["backbone"])
        shared = {"task": body["task"], "model": model, "checkpoint": place["checkpoint"]}
        for point in ({"setting": BASE, **place["base"]}, *place["points"]):
            params = shared | {name: point.get(name) for name in ("setting", "tau", "seed")}
            metrics = {name: point.get(name) for name in _OF_A_POINT}
            key = json_digest([run.key, params, metrics])
            tau = "" if params["tau"] is None else f" τ {params['tau']}"
            name = f"{params['setting']}{tau} {model}"
            run.tracker.comparison_run(
                run.key, key, name, params, metrics, source=ADAPTATION_SOURCE
            )


STATES: Final = (
    "which depend on the rules; states: at every state that decoding passes through, to compare "
    "rules by."
)

_SUMMARY_ROWS: Final = 12
_VARIANTS: Final = (  # headings of fields that may differ
    *("rules by", "overlap", "containment", "spans", "tokens asked", "revision"),
    *("positions", "depth", "kind", "residual", "rule rows", "merge depth", "adapter rank"),
    "unit positions",
)
_FIELDS: Final = {
    "tokens asked": "confidence_tokens",
    "positions": "module_positions",
}


def variants(rows: Sequence[ComparisonRow]) -> dict[str, str]:
    """Return what differs between the rows besides backbone and threshold: field by heading."""
    fields = {name: _FIELDS.get(name, name.replace(" ", "_")) for name in _VARIANTS}
    return {
        n: field for n, field in fields.items() if len({getattr(row, field) for row in rows}) > 1
    }


def comparison(rows: Sequence[ComparisonRow], config: Mapping[str, Any] | None = None) -> Table:
    """Return the comparison as people read it, a dash where nothing was measured."""
    tasks = dict.fromkeys(task for row in rows for task in row.tasks)
    names = {task: "acc." if task == DEFAULT_TASK else f"{task} acc." for task in tasks}
    table = file_table("comparison.txt", rows, variants=variants(rows), tasks=names)
    return _noted(table, "comparison_note.txt", rows, config, states=STATES)


def summary(rows: Sequence[ComparisonRow], config: Mapping[str, Any] | None = None) -> Table:
    """Return the comparison in few rows and columns, which fit a terminal."""
    table = file_table("summary.txt", rows[:_SUMMARY_ROWS])
    more = len(rows) - len(table.rows)
    return fitted(_noted(table, "summary_note.txt", rows, config, more=more))


def _noted(
    table: Table,
    template: str,
    rows: Sequence[ComparisonRow],
    config: Mapping[str, Any] | None,
    **values: object,
) -> Table:
    """Return a table with a note, which says on how much held-out data the rows were measured."""
    shown = {"table": table, "rows": rows, **values}
    note = environment().get_template(template).render(shown).split()
    return replace(table, note=" ".join([*note, *_measured_on(rows, config or {})]))


def _measured_on(rows: Sequence[ComparisonRow], config: Mapping[str, Any]) -> list[str]:
    """Return in a sentence, if any, what rows were measured on, those of the headline apart."""
    if not rows or "evaluate" not in config:
        return []
    headline = config.get("headline") if rows[0].source == "shipped" else None
    leading = 0 if headline is None else 1 + len(headline.get("beside", ()))
    parts = [_amounts(rows[leading:], config, config["evaluate"])] if rows[leading:] else []
    if headline is not None:
        own = _amounts(rows[:leading], config, headline["evaluate"])
        timed = headline.get("benchmark")
        if timed is not None:
            own += f", timed at {max(timed['prompt_lengths']):,} tokens"
        parts.append(f"{rows[0].model}: {own}")
    return [f"Measured on {'; '.join(parts)}."]


def _amounts(
    rows: Sequence[ComparisonRow], config: Mapping[str, Any], asked: Mapping[str, Any]
) -> str:
    """Return how many rows of text and questions were read, or asked for if rows do not say it."""
    aligned, scored = (
        _from_to({row.metric(name) or asked[name] for row in rows}) for name in TEXT_ROWS
    )
    words = f"{aligned} (Top-1) and {scored} (PPL) rows of {config['segment_length']} tokens"
    scores = [score.get(_QUESTIONS) for row in rows for score in row.scores.values()]
    questions = {asked["task_questions"] if one is None else one.value for one in scores}
    return f"{words}, {_from_to(questions)} questions" if questions else words


def _from_to(counts: set[float]) -> str:
    return " to ".join(f"{count:.0f}" for count in sorted({min(counts), max(counts)}))
