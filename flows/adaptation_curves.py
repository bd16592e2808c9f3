"""Parts of flow ``umim-adapt`` for a recipe of kind ``adaptation``: the curves of one task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tasks.report.compare import cell_label
from tasks.run.pipeline import PipelineRun
from tasks.run.recipes import find_recipe, recipe_names
from tasks.run.stage import Artifact, StageCall
from tasks.stages.adaptation import (
    ChoiceTask,
    Curve,
    ScoredModel,
    ScoredPoint,
    adaptation_stage,
    cell_of,
    choice_scores_stage,
    choices_stage,
    start_stage,
)
from tasks.stages.corpus import CorpusText, corpus_stage, task_stage
from tasks.stages.named import (
    NamedBackbone,
    NamedCheckpoint,
    NamedTask,
    NamedTokenizer,
    Questions,
)
from tasks.stages.train import (
    TRAININGS,
    ModuleTraining,
    control_stage,
    task_rules_stage,
    with_rules_stage,
)
from umim_core.adaptation.settings import BASE, WT, Setting, adaptation_steps
from umim_core.checkpoint.checkpoint_index import own_name
from umim_core.config.adaptation_recipe import AdaptationRecipe, DocstringQuestions
from umim_core.config.corpus import DocstringCorpus
from umim_core.config.recipe import (
    DEFAULT_TASK,
    AdaptConfig,
    Cell,
    DistillConfig,
    PreferenceConfig,
    Recipe,
)
from umim_core.errors import CheckpointError

AdaptationRun = PipelineRun[AdaptationRecipe]


def measure_adaptation(run: AdaptationRun) -> Artifact:
    """Questions; every setting, threshold, seed and control of every checkpoint; the curves."""
    task = _questions(run)
    curves = [_measured(run, task, checkpoint) for checkpoint in run.recipe.checkpoints]
    return run.stage(adaptation_stage(recipe=run.recipe, questions=Questions(task), curves=curves))


def _questions(run: AdaptationRun) -> Artifact:
    recipe = run.recipe
    if not isinstance(recipe.questions, DocstringQuestions):
        return run.stage(choices_stage(task=ChoiceTask(recipe)))
    corpus = run.stage(corpus_stage(text=CorpusText(DocstringCorpus())))
    return run.stage(task_stage(task=NamedTask(DEFAULT_TASK), sizes=recipe.sizes, corpus=corpus))


def _measured(run: AdaptationRun, task: Artifact, checkpoint: str) -> Curve:
    """Measure one curve: rules first, then trainings that do not depend on each other."""
    recipe = run.recipe
    start = run.stage(start_stage(checkpoint=NamedCheckpoint(checkpoint)), label=checkpoint)
    branch = _Branch(run, task, checkpoint, _cell(checkpoint), start)
    base = branch.score(ScoredModel(BASE, start), None)
    ready: list[tuple[ScoredModel, Artifact | None]] = [(ScoredModel(WT, start), None)]
    parts = [partial(branch.points, base, ready)]
    for tau in recipe.taus:
        config, label = recipe.adapt_config(tau), f"{checkpoint} tau {tau}"
        rules = run.stage(rules_of_task(task, branch.cell, config), label=label)
        untrained = branch.untrained(rules, tau)
        ready += [
            (ScoredModel(name, artifact, tau=tau), rules)
            for name, artifact in untrained.items()
            if name in recipe.settings
        ]
        parts += [
            partial(branch.trained, base, rules, untrained, tau, seed) for seed in recipe.seeds
        ]
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


def rules_of_task(task: Artifact, cell: Cell, config: AdaptConfig) -> StageCall:
    """Mine the rules of a task."""
    return task_rules_stage(
        questions=Questions(task, ("train",)),
        tokenizer=NamedTokenizer(cell.backbone, cell.revision),
        rules=config.rules,
        max_tokens=config.max_tokens,
    )


def adapted_stage(
    step: Setting,
    made: Mapping[str, Artifact],
    rules: Artifact,
    task: Artifact,
    cell: Cell,
    config: AdaptConfig,
    seed: int,
) -> StageCall:
    """Make one setting of those that it may start from, or of the rules of the task."""
    start = rules if step.start is None else made[step.start]
    if step.training == "none":
        return with_rules_stage(start=start, rules=rules)
    optimisation = config.sft if step.training == "sft" else config.dpo
    return TRAININGS[step.training](
        training=training_of(cell, seed, config.max_tokens, optimisation),
        questions=Questions(task, ("train", "valid")),
        start=start,
    )


def training_of(
    cell: Cell, seed: int, max_tokens: int, optimisation: DistillConfig | PreferenceConfig
) -> ModuleTraining:
    """Train the module of a cell."""
    backbone = NamedBackbone(cell.backbone, cell.revision)
    return ModuleTraining(backbone, cell.alone(), optimisation, max_tokens, seed)


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
        ruled = with_rules_stage(start=self.start, rules=rules)
        return {
            step.name: self.run.stage(ruled, label=label, setting=step.name)
            for step in adaptation_steps(self.run.recipe.settings)
            if step.training == "none"
        }

    def trained(
        self, base: Artifact, rules: Artifact, untrained: dict[str, Artifact], tau: int, seed: int
    ) -> list[ScoredPoint]:
        """Train and score the settings of one threshold with one seed."""
        config, label = (
            self.run.recipe.adapt_config(tau),
            f"{self.checkpoint} tau {tau} seed {seed}",
        )
        made = {WT: self.start, **untrained}
        models: list[tuple[ScoredModel, Artifact | None]] = []
        for step in adaptation_steps(config.settings):
            if step.training == "none":
                continue
            adapted = adapted_stage(step, made, rules, self.task, self.cell, config, seed)
            made[step.name] = self.run.stage(adapted, label=label, setting=step.name)
            if step.name in config.settings:
                model = ScoredModel(step.name, made[step.name], tau=tau, seed=seed)
                models.append((model, rules))
        return self.points(base, models)

    def control(self, base: Artifact, name: str, seed: int) -> list[ScoredPoint]:
        """Train and score a control with one seed."""
        recipe, optimisation = self.run.recipe, self.run.recipe.control_config(name)
        control = control_stage(
            control=name,
            training=training_of(self.cell, seed, recipe.max_tokens, optimisation),
            questions=Questions(self.task, ("train", "valid")),
        )
        trained = self.run.stage(control, label=f"{self.checkpoint} {name} seed {seed}")
        return self.points(base, [(ScoredModel(name, self.start, trained, seed=seed), None)])

    def score(self, model: ScoredModel, base: Artifact | None) -> Artifact:
        """Score the test questions; without a base it is the base itself."""
        of = {"tau": model.tau, "seed": model.seed}
        label = [f"{name} {value}" for name, value in of.items() if value is not None]
        scores = choice_scores_stage(
            questions=Questions(self.task, ("test",)),
            model=model,
            base=base,
            max_tokens=self.run.recipe.max_tokens,
            batch_size=self.run.recipe.batch_size,
        )
        return self.run.stage(scores, label=" ".join([self.checkpoint, model.setting, *label]))

    def points(
        self, base: Artifact, models: Sequence[tuple[ScoredModel, Artifact | None]]
    ) -> list[ScoredPoint]:
        """Score the test questions of models, each with the task's rules that it merges by."""
        return [ScoredPoint(model, self.score(model, base), rules) for model, rules in models]
