"""Parts of flow ``umim-adapt`` for a recipe of kind ``adaptation``: the curves of one task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tasks.report.compare import cell_label
from tasks.run.pipeline import PipelineRun
from tasks.run.recipes import find_recipe, recipe_names
from tasks.run.stage import Artifact
from tasks.stages.adaptation import (
    Curve,
    ScoredModel,
    ScoredPoint,
    adaptation_stage,
    cell_of,
    choice_scores_stage,
    choices_stage,
    control_stage,
    start_stage,
)
from tasks.stages.corpus import corpus_stage, task_stage
from tasks.stages.train import TRAININGS, task_rules_stage, with_rules_stage
from umim_core.adaptation.settings import BASE, WT, adaptation_steps
from umim_core.checkpoint.checkpoint_index import own_name
from umim_core.config.adaptation_recipe import AdaptationRecipe, DocstringQuestions
from umim_core.config.corpus import DocstringCorpus
from umim_core.config.recipe import DEFAULT_TASK, Cell, Recipe
from umim_core.errors import CheckpointError

AdaptationRun = PipelineRun[AdaptationRecipe]


def measure_adaptation(run: AdaptationRun) -> Artifact:
    """Questions; every setting, threshold, seed and control of every checkpoint; the curves."""
    task = _questions(run)
    curves = [_measured(run, task, checkpoint) for checkpoint in run.recipe.checkpoints]
    return run.stage(adaptation_stage, run.recipe, task, curves)


def _questions(run: AdaptationRun) -> Artifact:
    recipe = run.recipe
    if not isinstance(recipe.questions, DocstringQuestions):
        return run.stage(choices_stage, recipe)
    corpus = run.stage(corpus_stage, DocstringCorpus())
    return run.stage(task_stage, corpus, recipe.sizes, DEFAULT_TASK)


def _measured(run: AdaptationRun, task: Artifact, checkpoint: str) -> Curve:
    """Measure one curve: rules first, then trainings that do not depend on each other."""
    recipe, start = run.recipe, run.stage(start_stage, checkpoint, label=checkpoint)
    branch = _Branch(run, task, checkpoint, _cell(checkpoint), start)
    base = branch.score(ScoredModel(BASE, start), None)
    ready: list[tuple[ScoredModel, Artifact | None]] = [(ScoredModel(WT, start), None)]
    parts = [partial(branch.points, base, ready)]
    for tau in recipe.taus:
        rules = branch.rules(tau)
        ruled = branch.untrained(rules, tau)
        named = {name: artifact for name, artifact in ruled.items() if name in recipe.settings}
        ready += [(ScoredModel(name, artifact, tau=tau), rules) for name, artifact in named.items()]
        training_inputs = (base, rules, ruled, tau)
        parts += [partial(branch.trained, *training_inputs, seed) for seed in recipe.seeds]
    parts += [
        partial(branch.control, base, control, seed)
        for control in recipe.controls
        for seed in recipe.seeds
    ]
    points_by_part = run.run_parallel(parts)
    return Curve(checkpoint, start, base, [point for points in points_by_part for point in points])


def _cell(checkpoint: str) -> Cell:
    """Return backbone and form of a checkpoint; of one that is planned, those of its recipe."""
    try:
        return cell_of(checkpoint)
    except CheckpointError:
        name = checkpoint.partition("/")[0]
        trained = find_recipe(name) if name in recipe_names() else None
        for cell in trained.cells if isinstance(trained, Recipe) else ():
            if checkpoint.startswith(own_name(name, cell_label(cell)) + "/"):
                return cell
        raise


@dataclass(frozen=True)
class _Branch:
    """Run, questions and start that all points of a curve share."""

    run: AdaptationRun
    task: Artifact
    checkpoint: str
    cell: Cell
    start: Artifact

    def untrained(self, rules: Artifact, tau: int) -> dict[str, Artifact]:
        """Make the settings that are not trained, those that trained ones start from included."""
        label = f"{self.checkpoint} tau {tau}"
        return {
            step.name: self.run.stage(
                with_rules_stage, self.start, rules, label=label, setting=step.name
            )
            for step in adaptation_steps(self.run.recipe.settings)
            if step.training == "none"
        }

    def trained(
        self, base: Artifact, rules: Artifact, ruled: dict[str, Artifact], tau: int, seed: int
    ) -> list[ScoredPoint]:
        """Train and score the settings of one threshold with one seed."""
        recipe = self.run.recipe.model_copy(update={"seed": seed})
        config, label = recipe.adapt_config(tau), f"{self.checkpoint} tau {tau} seed {seed}"
        artifacts = {WT: self.start, **ruled}
        models: list[tuple[ScoredModel, Artifact | None]] = []
        for step in adaptation_steps(config.settings):
            if step.training == "none":
                continue
            begin = rules if step.start is None else artifacts[step.start]
            stage_inputs = (self.run.lease, recipe, config, self.cell, self.task, begin)
            artifacts[step.name] = self.run.stage(
                TRAININGS[step.training], *stage_inputs, label=label, setting=step.name
            )
            if step.name in config.settings:
                model = ScoredModel(step.name, artifacts[step.name], tau=tau, seed=seed)
                models.append((model, rules))
        return self.points(base, models)

    def control(self, base: Artifact, name: str, seed: int) -> list[ScoredPoint]:
        """Train and score a control with one seed."""
        recipe = self.run.recipe.model_copy(update={"seed": seed})
        label = f"{self.checkpoint} {name} seed {seed}"
        stage_inputs = (self.run.lease, recipe, self.cell, self.task, name)
        trained = self.run.stage(control_stage, *stage_inputs, label=label)
        return self.points(base, [(ScoredModel(name, self.start, trained, seed=seed), None)])

    def rules(self, tau: int) -> Artifact:
        """Mine the rules of the task by one threshold, or find them."""
        config, label = self.run.recipe.adapt_config(tau), f"{self.checkpoint} tau {tau}"
        stage_inputs = (self.task, self.cell, config.rules, config.max_tokens)
        return self.run.stage(task_rules_stage, *stage_inputs, label=label)

    def score(self, model: ScoredModel, base: Artifact | None) -> Artifact:
        """Score the test questions; without a base it is the base itself."""
        parts = (self.checkpoint, model.setting)
        tau = () if model.tau is None else (f"tau {model.tau}",)
        seed = () if model.seed is None else (f"seed {model.seed}",)
        stage_inputs = (self.run.lease, self.run.recipe, self.task, model, base)
        return self.run.stage(
            choice_scores_stage, *stage_inputs, label=" ".join(parts + tau + seed)
        )

    def points(
        self, base: Artifact, models: Sequence[tuple[ScoredModel, Artifact | None]]
    ) -> list[ScoredPoint]:
        """Score the test questions of models, each with the task's rules that it merges by."""
        return [ScoredPoint(model, self.score(model, base), rules) for model, rules in models]
