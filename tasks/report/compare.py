"""The comparison: one row per cell and setting, from the artifacts that measured it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.report.comparison import COMPARISON_METRICS, Accuracy, ComparisonRow, limit_words
from tasks.run.pipeline import PipelineRun
from tasks.run.stage import Artifact
from tasks.stages.given_rules import describe_given, given_name
from umim_core.adaptation.settings import WT
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.form import deviations
from umim_core.config.recipe import Cell
from umim_core.rules.ruleset import RULES_SCHEMA
from umim_core.store.artifacts import canonical_json, read_manifest, sha256_bytes

BASE_SETTING = WT
_RULES = "checkpoint/rules"


@dataclass
class CellResult:
    """Everything one cell led to.

    Attributes:
        cell: Backbone, rules and module variant.
        tokenized: Token ids.
        filtered: Rules.
        distilled: Trained checkpoint; None before training.
        settings: Artifact with a ``checkpoint`` per adaptation setting.
        evaluations: Alignment and perplexity per setting.
        scores: Task accuracy per setting, with "base".
        benchmark: Throughput.
    """

    cell: Cell
    tokenized: Artifact
    filtered: Artifact
    distilled: Artifact | None = None
    settings: dict[str, Artifact] = field(default_factory=dict)
    evaluations: dict[str, Artifact] = field(default_factory=dict)
    scores: dict[str, Artifact] = field(default_factory=dict)
    benchmark: Artifact | None = None


@dataclass
class ShippedResult:
    """What was measured on a checkpoint that this run did not train."""

    name: str
    evaluation: Artifact
    scores: dict[str, Artifact] = field(default_factory=dict)
    benchmark: Artifact | None = None


def comparison_rows(
    cells: list[CellResult], shipped: list[ShippedResult], seed: int
) -> list[ComparisonRow]:
    """Return one row per cell and setting that was evaluated, shipped checkpoints last."""
    rows = [
        cell_row(
            result.cell,
            setting=setting,
            seed=seed,
            metrics=_metrics(evaluation, result.benchmark if setting == BASE_SETTING else None)
            | {"rules": float(sum(rule_counts(result.settings[setting].path / _RULES).values()))}
            | _own_accuracy(setting, result.scores),
            accuracies=_accuracies(result.scores) if setting == BASE_SETTING else {},
        )
        for result in cells
        for setting, evaluation in result.evaluations.items()
    ]
    return rows + [_shipped_row(result) for result in shipped]


def cell_row(cell: Cell, **measured: Any) -> ComparisonRow:
    """Return the row of a cell.

    Args:
        cell: What was compared.
        measured: The row's other fields: setting, seed, metrics, accuracies.
    """
    rules: dict[str, Any] = {
        "tau": cell.tau,
        "rule_source": cell.source,
        "overlap": cell.overlap,
        "containment": cell.containment,
    }
    return ComparisonRow(
        backbone=cell.backbone,
        **(rules if cell.rules is None else describe_given(cell)),
        min_probability=cell.min_probability if cell.source == "confidence" else 0.0,
        rule_budget=cell.rule_budget,
        confidence_tokens=cell.confidence_tokens,
        revision=cell.revision,
        positions=cell.positions,
        depth=cell.depth,
        kind=cell.kind,
        unit_positions=cell.unit_positions,
        **measured,
    )


def _shipped_row(result: ShippedResult) -> ComparisonRow:
    checkpoint = Checkpoint.load(result.name)
    rules = checkpoint.rules
    seed = checkpoint.config.training.get("seed")
    return ComparisonRow(
        backbone=checkpoint.config.backbone,
        tau=rules.tau,
        setting=BASE_SETTING,
        rule_source=rules.source,
        min_probability=None if rules.source == "confidence" else 0.0,  # no checkpoint tells it
        overlap=rules.overlap,
        containment=rules.containment,
        positions=checkpoint.config.positions,
        depth=checkpoint.config.depth,
        kind=checkpoint.config.kind,
        unit_positions=checkpoint.config.unit_positions,
        seed=seed if isinstance(seed, int) else None,
        source="shipped",
        metrics=_metrics(result.evaluation, result.benchmark) | {"rules": float(len(rules))},
        accuracies=_accuracies(result.scores),
    )


def _metrics(evaluation: Artifact, benchmark: Artifact | None) -> dict[str, float | None]:
    found: Mapping[str, float] = evaluation.metrics
    metrics: dict[str, float | None] = {
        name: value
        for name, value in found.items()
        if name in COMPARISON_METRICS or name.startswith(("ppl_base_ood_", "ppl_umim_ood_"))
    }
    if benchmark is not None:
        for name in ("prefill_speedup", "decode_speedup"):
            metrics[name] = benchmark.metrics.get(name)
    return metrics


def rule_counts(rules: Path) -> dict[int, int]:
    """Return how many rules of each order a rule directory says it holds."""
    manifest = read_manifest(rules, kind="rules", schema=RULES_SCHEMA, verify=False)
    return {int(n): int(count) for n, count in manifest["rules"].items()}


def _own_accuracy(setting: str, scores: dict[str, Artifact]) -> dict[str, float | None]:
    """Return the accuracy of the base model and of one setting, where they were measured."""
    named = {"accuracy_base": scores.get("base"), "accuracy_umim": scores.get(setting)}
    return {name: score.metrics["acc_tok"] for name, score in named.items() if score is not None}


def _accuracies(scores: dict[str, Artifact]) -> dict[str, Accuracy]:
    return {
        setting: Accuracy(
            value=score.metrics["acc_tok"],
            stderr=score.metrics["acc_tok_stderr"],
            token_reduction=score.metrics.get("context_token_reduction", 0.0),
        )
        for setting, score in scores.items()
    }


def cell_label(cell: Cell) -> str:
    """Return what a cell is called on Prefect's pages."""
    sure = f"confidence {cell.min_probability:g} " if cell.source == "confidence" else ""
    made = f"{sure}tau {cell.tau} {cell.overlap}+{cell.containment}"
    if cell.rules is not None:
        made = f"rules {given_name(cell)}"
    rules = f"{short_name(cell.backbone)} {made}"
    limits = limit_words(cell.rule_budget, cell.confidence_tokens, cell.revision)
    forms = deviations(cell.positions, cell.depth, cell.kind, cell.unit_positions)
    return ", ".join([rules, *limits, *forms])


def short_name(backbone: str) -> str:
    """Return a name that MLflow's plots can show: they cut labels after ten characters."""
    return backbone.rstrip("/").rpartition("/")[2].removeprefix("umim-")


def run_label(row: ComparisonRow) -> str:
    """Return what a row's run is called in MLflow's lists: all that tells it from the others."""
    short = row.model_copy(update={"backbone": short_name(row.backbone)})
    return f"{row.setting} {short.label}"


def record_comparison(run: PipelineRun, rows: list[ComparisonRow]) -> None:
    """Write each row as one flat MLflow run; equal rows are found, not added."""
    for row in rows:
        key = sha256_bytes(
            canonical_json([run.key, row.source, row.params(), row.measured()]).encode()
        )
        run.tracker.comparison_run(
            key,
            {**row.params(), "model": short_name(row.backbone)},
            row.measured(),
            name=run_label(row),
            pipeline=run.key,
            tags={"umim.source": row.source},
        )
