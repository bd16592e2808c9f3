"""Stage ``report``: gather what a pipeline measured and write its pages."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from tasks.report.ablation import FIGURES, ablation_page, ablation_text, figure_svg
from tasks.report.comparison import ComparisonRow, Result, comparison_rows, rule_counts
from tasks.report.render import Report
from tasks.report.report import ReportData, agreement, write_report
from tasks.run.stage import Artifact, Metrics, Site, stage
from tasks.stages.corpus import split_tokens
from tasks.stages.evaluate import throughput_rows
from umim_core.adaptation.settings import WT, find_setting
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.checkpoint.checkpoint_files import named_config
from umim_core.config.recipe import Recipe
from umim_core.model.compression import compress_text
from umim_core.rules.grams import MAX_LONGEST, orders_to
from umim_core.store.artifacts import read_json, write_json
from umim_core.store.disk import write_bytes
from umim_core.task_sets.spec import TASKS
from umim_core.text.token_ids import decode
from umim_core.throughput.break_even import break_even
from umim_core.training.train_job import read_curve

_EXAMPLE_TOKENS = 160
_PAIRS = 0.5  # of which labels say no share: two tokens are always one unit


@stage(version=8)
def report_stage(out: Path, _: Site, *, recipe: Recipe, results: Sequence[Result]) -> Metrics:
    """Write ``report.html`` and ``report.json``."""
    rows = comparison_rows(results, recipe.seed)
    cells_first = sorted(results, key=lambda result: result.cell is None)
    speeds = [_measured_speeds(result) for result in cells_first]
    data = ReportData(
        recipe=recipe.name,
        config=recipe.model_dump(mode="json"),
        host=host(),
        rows=tuple(rows),
        checkpoints=tuple(
            {"label": f"{result.label}, {setting}", "path": str(checkpoint)}
            for result in results
            for setting, checkpoint in result.checkpoints.items()
        ),
        curves=tuple(curve for result in results for curve in _curves(result)),
        throughput=tuple(row for rows, _ in speeds for row in rows),
        break_even=tuple(start for _, starts in speeds for start in starts),
        rule_counts=tuple(
            {"label": result.label, **_rule_steps(result.filtered.metrics)}
            for result in results
            if result.filtered is not None
        ),
        chance={task: TASKS.find(task).chance for row in rows for task in row.tasks},
        examples=(_example(rows, results),),
    )
    write_report(out, data)
    return {"rows": float(len(rows))}


def _example(rows: list[ComparisonRow], results: Sequence[Result]) -> Report:
    """Return the spans of held-out text, by the rules of the checkpoint that agrees most.

    It has the highest Top-1 before adaptation, at every state that decoding passes through, which
    compares rules (where that was not measured, at unit ends).
    """
    places = [
        (str(result.checkpoints[setting]), result.tokenized)
        for result in results
        for setting in result.evaluated
    ]
    merged = [pair for pair in zip(rows, places, strict=True) if pair[0].setting == WT]
    best, (source, tokenized) = max(merged, key=lambda pair: agreement(pair[0]))
    label = f"{best.label} on held-out text"
    if len(merged) > 1:
        label += f" (highest Top-1 of {len(merged)} checkpoints)"
    config = named_config(source)
    tokenizer = load_tokenizer(config.backbone, revision=config.backbone_revision)
    text = decode(tokenizer, split_tokens(tokenized, "test")[:_EXAMPLE_TOKENS].tolist())
    cut = compress_text(text, source)
    return {"label": label, "spans": list(zip(cut.units, cut.unit_lengths, strict=True))}


def host() -> dict[str, str]:
    """Return facts of this machine, in the order to be shown."""
    return {
        "platform": platform.platform(),
        "processor cores": str(os.cpu_count()),
        "python": platform.python_version(),
    }


def _curves(result: Result) -> list[Report]:
    curves = []
    for setting, artifact in result.settings.items():
        training = find_setting(setting).training
        if training == "none":
            continue
        measure = "loss" if training == "dpo" else "kl"
        curve = read_curve(artifact.path)
        points = {
            words: [(int(row["step"]), row[name]) for row in curve if name in row]
            for words, name in (("train", f"train_{measure}"), ("validation", f"valid_{measure}"))
        }
        label = f"{result.label}, {setting}"
        curves.append(
            {"label": label, "quantity": "preference" if training == "dpo" else "KL", **points}
        )
    return curves


def _measured_speeds(result: Result) -> tuple[list[Report], list[Report]]:
    """Return the speeds of a checkpoint, and from which length on it pays."""
    if result.benchmark is None:
        return [], []

    def labelled(row: Report) -> Report:
        reduction = row["asked_reduction"]
        pairs = "pairs" if reduction == _PAIRS else f"pairs at {100 * (reduction or 0):.3g} %"
        return row | {"label": f"{result.label}, {'natural rules' if reduction is None else pairs}"}

    rows = throughput_rows(result.benchmark)
    return [labelled(vars(row)) for row in rows], [labelled(row) for row in break_even(rows)]


def _rule_steps(metrics: Metrics) -> dict[str, dict[str, int]]:
    return {
        step: {
            str(n): int(metrics[f"{step}_{n}"])
            for n in orders_to(MAX_LONGEST)
            if f"{step}_{n}" in metrics
        }
        for step in ("raw", "overlap", "rules")
    }


@stage(version=4)
def ablation_stage(out: Path, _: Site, *, recipe: Recipe, results: Sequence[Result]) -> Metrics:
    """Write ``<recipe>.json``, its page ``<recipe>.md`` and the figures."""
    rows = [row for row in comparison_rows(results, recipe.seed) if row.setting == WT]
    trained = [result.settings[WT] for result in results]
    rules = [result.filtered for result in results if result.filtered is not None]
    made = {
        "kind": "ablation",  # tells the file apart from other results
        "name": recipe.name,
        "description": recipe.description,
        "seed": recipe.seed,
        "budget": {
            "steps": recipe.distill.max_steps,
            "rows": recipe.distill.batch_size,
            "tokens": recipe.segment_length,
        },
        "evaluation": recipe.evaluate.model_dump(include={"alignment_rows", "perplexity_rows"}),
        "recipe": recipe.model_dump(mode="json"),
        "machine": host(),
        "versions": _versions(trained),
        "cells": [*map(_cell, results, rows, trained, rules)],
    }
    data = json.loads(to_json(made, inf_nan_mode="null"))
    write_json(out / f"{recipe.name}.json", data)
    write_bytes(out / f"{recipe.name}.md", ablation_page(data).encode())
    for name in FIGURES:
        write_bytes(out / f"{recipe.name}-{name}.svg", figure_svg(data, name).encode())
    return {"cells": float(len(rows))}


def _versions(trained: list[Artifact]) -> dict[str, str]:
    """Return the libraries of all trainings, every version that one of them used."""
    by_library: dict[str, dict[str, None]] = {}  # in the order of the cells
    for artifact in trained:
        for name, version in artifact.manifest()["facts"]["versions"].items():
            by_library.setdefault(name, {})[str(version)] = None
    return {name: " and ".join(versions) for name, versions in by_library.items()}


def _cell(result: Result, row: ComparisonRow, trained: Artifact, rules: Artifact) -> Report:
    facts, evaluated = trained.manifest()["facts"], result.evaluations[WT].metrics
    return {
        "row": row,
        "rules": rule_counts(rules.path / "rules"),
        # Share of rules that share a surrogate with another in a module without positions.
        "collision_rate": rules.metrics.get("collision_rate"),
        "training": trained.metrics | {"seconds": float(facts["seconds"])},
        "trained_on": str(facts["platform"]),
        "further": {name: value for name, value in evaluated.items() if name not in row.metrics},
        "withdrawn": [],
    }


def ablation_summary(ablation: Artifact, name: str) -> str:
    """Return the table for a terminal, and where the files are."""
    data: Any = read_json(ablation.path / f"{name}.json")
    files = sorted(map(str, ablation.path.glob(f"{name}*")))
    return "\n".join([ablation_text(data), *files])
