"""The comparison: one row per cell and setting, from the artifacts that measured it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tasks.report.comparison import (
    COMPARISON_METRICS,
    TASK_TR,
    ComparisonRow,
    Measured,
    cell_row,
    cell_words,
    given_name,
    held_rules,
    is_of_a_text,
    shown_name,
)
from tasks.run.pipeline import PipelineRun
from tasks.run.stage import Artifact
from tasks.tracking.compare_view import ADAPTATION_SOURCE
from umim_core.adaptation.settings import BASE, WT, find_setting, measures
from umim_core.checkpoint.checkpoint_files import read_config, resolve_checkpoint
from umim_core.checkpoint.checkpoint_index import own_name
from umim_core.config.adaptation_recipe import AdaptationRecipe
from umim_core.config.recipe import Cell
from umim_core.errors import ConfigError, require
from umim_core.rules.ruleset import RULES_SCHEMA
from umim_core.store.artifacts import json_digest, read_json, read_manifest
from umim_core.task_sets.spec import TASKS

_OF_A_POINT: Final = (
    *("rules", "token_reduction", "input_reduction", "accuracy", "accuracy_se", "difference"),
    *("difference_se", "gained", "lost", "margin", "margin_difference", "margin_difference_se"),
)


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
        training = read_config(resolve_checkpoint(self.name)).training
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


def comparison_rows(results: Sequence[Result], seed: int) -> list[ComparisonRow]:
    return [_row(result, setting, seed) for result in results for setting in result.evaluated]


def _row(result: Result, setting: str, seed: int) -> ComparisonRow:
    directory = resolve_checkpoint(result.checkpoints[setting])
    values: Mapping[str, float] = result.evaluations[setting].metrics
    shown: dict[str, float | None] = {
        name: value
        for name, value in values.items()
        if name in COMPARISON_METRICS or is_of_a_text(name)
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
    manifest = read_manifest(rules, kind="rules", schema=RULES_SCHEMA, verify=False)
    return {int(n): int(count) for n, count in manifest["rules"].items()}


def _score(names: Sequence[str], metrics: Mapping[str, float]) -> dict[str, Measured]:
    """Return the metrics of a task, with the token reduction where the task merges."""
    score = {
        name: Measured(value=metrics[name], stderr=metrics.get(f"{name}_stderr")) for name in names
    }
    reduction = metrics.get("context_token_reduction", metrics["token_reduction"])
    return score | {TASK_TR: Measured(value=reduction)}


def cell_label(cell: Cell) -> str:
    """Return what a cell is called on Prefect's pages."""
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


def record_comparison(run: PipelineRun, rows: list[ComparisonRow]) -> None:
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
