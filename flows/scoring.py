"""Task scores of settings."""

from __future__ import annotations

from pathlib import Path

from tasks.report.compare import Scores
from tasks.run.pipeline import PipelineRun
from tasks.run.stage import Artifact
from tasks.stages.evaluate import task_score_stage
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
    config: EvaluateConfig | None = None,
) -> Scores:
    """Score a setting, if the table says so: an adapted one on its own task, others on every task.

    ``config`` says how much, by default as much as the recipe's cells.
    """
    first, scores = next(iter(tasks), None), Scores()
    for name, questions in tasks.items() if measures(setting, "accuracy") else ():
        merge = "none" if setting == BASE else TASKS.find(name).merge
        if setting in (BASE, WT) or name == first:
            scores[name, setting] = run.stage(
                task_score_stage,
                run.lease,
                questions,
                checkpoint,
                merge,
                config or run.recipe.evaluate,
                *run.recipe.placement,
                label=label if name == first else f"{label}, {name}",
            )
    return scores
