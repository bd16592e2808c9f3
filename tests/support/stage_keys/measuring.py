"""Calls of the stages that measure and show, and what their keys must not hold."""

from __future__ import annotations

from support.stage_keys.inputs import NO_MATTER_HOW, Inputs
from support.stage_keys.variations import StageCall
from tasks.cluster.lease import ClusterLease
from tasks.report.compare import CellResult, ShippedResult
from tasks.stages.evaluate import benchmark_stage, evaluate_stage, task_score_stage
from tasks.stages.publish import ablation_stage, report_stage
from umim_core.config.evaluate import BenchmarkConfig, EvaluateConfig
from umim_core.config.recipe import DEFAULT_TASK, ClusterConfig


def measuring_calls(inputs: Inputs) -> dict[str, StageCall]:
    """Return a call of every stage that measures."""
    placed = {"device": "cpu", "dtype": "float32"}
    where = {"lease": NO_MATTER_HOW}
    measured = {"tokenized": inputs.tokenized(), "checkpoint": inputs.checkpoint}
    asked = {"lease": inputs.lease, "task": inputs.task(), "checkpoint": inputs.checkpoint,
             "config": EvaluateConfig(), **placed}  # fmt: skip
    not_asked = where | {
        f"config.{name}": "of stage evaluate"
        for name in ("alignment_rows", "perplexity_rows", "batch_size", "segments")
    }
    return {
        "evaluate": StageCall(
            evaluate_stage,
            {
                "lease": inputs.lease,
                **measured,
                "config": EvaluateConfig(),
                "segment_length": 32,
                **placed,
            },
            {**where, "config.task_questions": "of stage task-score"},
        ),
        "task-score": StageCall(task_score_stage, {**asked, "merge": "prompt"}, not_asked),
        "task-score of the base model": StageCall(
            task_score_stage,
            {**asked, "merge": "none"},
            {**not_asked, "checkpoint": "the base model has no module; the backbone is one"},
        ),
        "benchmark": StageCall(
            benchmark_stage,
            {
                "lease": ClusterLease(ClusterConfig(workers=2, cpus=3)),
                **measured,
                "config": BenchmarkConfig(),
                **placed,
            },
            {
                f"lease.{name}": NO_MATTER_HOW
                for name in ClusterConfig.model_fields
                if name not in ("address", "cpus")
            },
        ),
    }


def page_calls(inputs: Inputs) -> dict[str, StageCall]:
    """Return a call of every stage that shows what was measured."""
    make = inputs.artifacts.make
    result = CellResult(
        inputs.cell,
        inputs.tokenized(),
        make("filter", "rules"),
        make("distill", "checkpoint"),
        {"WT": make("distill", "checkpoint"), "WT + FT": make("sft", "checkpoint")},
        {name: make("evaluate", "x", changed=name) for name in ("WT", "WT + FT")},
        {(DEFAULT_TASK, of): make("task-score", "x", changed=of) for of in ("WT", "base")},
        make("benchmark", "throughput.json"),
    )
    score = {(DEFAULT_TASK, "WT"): make("task-score", "x")}
    evaluated, timed = make("evaluate", "x"), make("benchmark", "x")
    shipped = ShippedResult("umim-docs-llama", inputs.tokenized(), evaluated, score, timed)
    cells = [result, CellResult(inputs.cell, result.tokenized, result.filtered,
                                settings={"WT": make("sft", "checkpoint")},
                                evaluations={"WT": make("evaluate", "y")})]  # fmt: skip
    known = {
        f"[{number}].{name}": reason
        for number, of in enumerate(cells)
        for name, reason in (
            ("cell", "is one of the recipe's cells"),
            ("tokenized", "reaches the stage through what was measured on it"),
            ("distilled", "is the setting WT"),
        )
        if getattr(of, name) is not None
    }
    not_shown = "an ablation shows the setting WT and no scores"
    return {
        "report": StageCall(
            report_stage,
            {"recipe": inputs.recipe, "cells": cells, "shipped": [shipped],
             "links": {"MLflow": "http://127.0.0.1:5000/1"}, "lease": inputs.lease},
            {**{f"cells{name}": reason for name, reason in known.items()},
             "links": "addresses of this run's pages, not of what was measured",
             "lease": NO_MATTER_HOW,
             "shipped[0].name": "is the recipe's", "shipped[0].leads": "is the recipe's",
             "shipped[0].tokenized": "reaches the stage through what was measured on it"},
        ),
        "ablation": StageCall(
            ablation_stage,
            {"recipe": inputs.recipe, "results": cells},
            {**{f"results{name}": reason for name, reason in known.items()},
             "results[0].evaluations[WT + FT]": not_shown,
             "results[0].scores": not_shown, "results[0].benchmark": not_shown},
        ),
    }  # fmt: skip
