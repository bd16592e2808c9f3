"""Measurements of shipped checkpoints, which a run did not train."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial

from flows.scoring import score
from tasks.plan.planner import Planner
from tasks.report.compare import Scores, ShippedResult, setting_of
from tasks.run.checks import check_headline_positions, why_absent
from tasks.run.pipeline import PipelineRun
from tasks.run.side_by_side import Part
from tasks.run.stage import Artifact
from tasks.stages.benchmark import benchmark_stage
from tasks.stages.corpus import tokenize_stage
from tasks.stages.evaluate import evaluate_stage
from umim_core.adaptation.settings import BASE, measures
from umim_core.checkpoint.checkpoint_files import read_config, resolve_checkpoint
from umim_core.config.evaluate import BenchmarkConfig, EvaluateConfig

logger = logging.getLogger("umim.pipeline")
Tasks = dict[str, Artifact]


@dataclass
class Shipped:
    """A shipped checkpoint that is being measured: how much, and what was found so far."""

    name: str
    setting: str
    tokenized: Artifact
    evaluate: EvaluateConfig
    benchmark: BenchmarkConfig | None
    leads: bool
    evaluation: Artifact | None = None
    scores: Scores = field(default_factory=Scores)


def find_shipped(run: PipelineRun, corpus: Artifact) -> list[Shipped]:
    """The recipe's shipped checkpoints, the corpus in the ids of each one's tokenizer.

    A run fetches the headline's backbone where it is not on this machine, a plan does not.
    """
    recipe, headline = run.recipe, run.recipe.headline
    wanted = [(name, recipe.evaluate, recipe.benchmark, False) for name in recipe.shipped]
    if headline is not None:
        reason = why_absent(headline.checkpoint, local_files_only=isinstance(run, Planner))
        if reason is None:
            check_headline_positions(recipe, headline)  # it may have been fetched just now
            first = (headline.checkpoint, headline.evaluate, headline.benchmark, True)
            wanted.insert(0, first)
        else:
            logger.warning("the row of %s is left out: %s", headline.checkpoint, reason)
    return [_shipped_row(run, corpus, *of) for of in wanted]


def _shipped_row(
    run: PipelineRun,
    corpus: Artifact,
    name: str,
    evaluate: EvaluateConfig,
    benchmark: BenchmarkConfig | None,
    leads: bool,
) -> Shipped:
    checkpoint = read_config(resolve_checkpoint(name))
    setting = setting_of(checkpoint)
    tokenized = run.stage(
        tokenize_stage,
        run.lease,
        corpus,
        run.recipe.corpus,
        checkpoint.backbone,
        checkpoint.backbone_revision,
        label=checkpoint.backbone,
    )
    timed = benchmark if measures(setting, "speed") else None
    return Shipped(name, setting, tokenized, evaluate, timed, leads)


def measurements(run: PipelineRun, tasks: Tasks, shipped: list[Shipped]) -> list[Part]:
    """Return parts that measure shipped checkpoints as cells are measured."""
    parts: list[Part] = []
    for of in shipped:
        parts.append(partial(_measured, run, of))
        parts += [partial(_scored, run, tasks, of, setting) for setting in (of.setting, BASE)]
    return parts


def _measured(run: PipelineRun, of: Shipped) -> None:
    of.evaluation = run.stage(
        evaluate_stage,
        run.lease,
        of.tokenized,
        of.name,
        of.evaluate,
        run.recipe.segment_length,
        *run.recipe.placement,
        label=f"{of.name} (shipped)",
    )


def _scored(run: PipelineRun, tasks: Tasks, of: Shipped, setting: str) -> None:
    label = f"{of.name} (shipped) {setting}"
    of.scores |= score(run, tasks, setting, of.name, label, config=of.evaluate)


def benchmark_shipped(run: PipelineRun, shipped: list[Shipped]) -> list[ShippedResult]:
    """Throughput of shipped checkpoints; with it everything about them is measured."""
    results = []
    for of in shipped:
        if of.evaluation is None:
            continue
        scores = dict(sorted(of.scores.items(), key=lambda item: item[0][1] == BASE))
        result = ShippedResult(of.name, of.tokenized, of.evaluation, scores, leads=of.leads)
        if of.benchmark is not None:
            result.benchmark = run.stage(
                benchmark_stage,
                run.lease,
                of.tokenized,
                of.name,
                of.benchmark,
                *run.recipe.placement,
                label=f"{of.name} (shipped)",
            )
        results.append(result)
    return results
