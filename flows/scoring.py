"""Task scores of settings and baselines, and the measurements of baselines."""

from __future__ import annotations

from pathlib import Path

from tasks.report.compare import BaselineResult, CellResult, Scores, cell_label
from tasks.run.pipeline import PipelineRun
from tasks.run.stage import Artifact
from tasks.stages.evaluate import baseline_stage, task_score_stage
from umim_core.adaptation.settings import BASE, WT, measures
from umim_core.config.evaluate import EvaluateConfig
from umim_core.task_sets.spec import TASKS


def score(
    run: PipelineRun,
    tasks: dict[str, Artifact],
    setting: str,
    checkpoint: Path | str,
    label: str,
    *,
    method: str | None = None,
    config: EvaluateConfig | None = None,
) -> Scores:
    """Score a setting, if the table says so: an adapted one on its own task, others on every task.

    ``config`` says how much, by default as much as the recipe's cells. A baseline shortens prompts:
    tasks whose answers are merged, too, do not apply to it.
    """
    first, found = next(iter(tasks), None), Scores()
    for name, questions in tasks.items() if measures(setting, "accuracy") else ():
        merge = "none" if setting == BASE else TASKS.find(name).merge
        if (setting in (BASE, WT) or name == first) and (method is None or merge == "prompt"):
            found[name, setting] = run.stage(
                task_score_stage,
                run.lease,
                questions,
                checkpoint,
                merge,
                config or run.recipe.evaluate,
                *run.recipe.placement,
                *(() if method is None else (method,)),
                label=label if name == first else f"{label}, {name}",
            )
    return found


def measure_baselines(
    run: PipelineRun, tasks: dict[str, Artifact], checkpoint: Path, result: CellResult
) -> dict[str, BaselineResult]:
    """Measure the recipe's baselines in the place of a cell's checkpoint."""
    recipe, found = run.recipe, {}
    for name in recipe.baselines:
        label = f"{cell_label(result.cell)} {name}"
        measured = run.stage(
            baseline_stage,
            run.lease,
            result.tokenized,
            checkpoint,
            name,
            recipe.evaluate,
            recipe.segment_length,
            *recipe.placement,
            label=label,
        )
        scores = score(run, tasks, WT, checkpoint, label, method=name)
        found[name] = BaselineResult(measured, scores)
    return found
