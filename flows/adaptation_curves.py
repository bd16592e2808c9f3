"""Parts of flow ``umim-adapt`` for a recipe of kind ``adaptation``: the curves of one task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product

from tasks.report.compare import cell_label
from tasks.run.pipeline import PipelineRun
from tasks.run.recipes import find_recipe, recipe_names
from tasks.run.stage import Artifact, StageCall
from tasks.stages.adaptation import (
    ChoiceTask,
    Curve,
    ScoredModel,
    ScoredPoint,
    adaptation_header,
    adaptation_stage,
    cell_of,
    choice_scores_stage,
    choices_stage,
    start_stage,
)
from tasks.stages.corpus import CorpusText, corpus_stage, task_stage
from tasks.stages.named import NamedBackbone, NamedCheckpoint, NamedTask, NamedTokenizer, Questions
from tasks.stages.train import (
    TRAININGS,
    ModuleTraining,
    control_stage,
    task_rules_stage,
    with_rules_stage,
)
from umim_core.adaptation.settings import BASE, WT, adaptation_steps
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
    adaptation = adaptation_stage(
        header=adaptation_header(run.recipe), questions=Questions(task), curves=curves
    )
    return run.stage(adaptation)


def _questions(run: AdaptationRun) -> Artifact:
    recipe = run.recipe
    if not isinstance(recipe.questions, DocstringQuestions):
        return run.stage(choices_stage(task=ChoiceTask(recipe)))
    corpus = run.stage(corpus_stage(text=CorpusText(DocstringCorpus())))
    return run.stage(task_stage(task=NamedTask(DEFAULT_TASK), sizes=recipe.sizes, corpus=corpus))


def _measured(run: AdaptationRun, task: Artifact, checkpoint: str) -> Curve:
    """Measure one curve: rules first, then trainings that do not depend on each other."""
    recipe, cell = run.recipe, _cell(checkpoint)
    start = run.stage(start_stage(checkpoint=NamedCheckpoint(checkpoint)), label=checkpoint)
    score = partial(_scored, run, task, checkpoint)
    base = score(ScoredModel(BASE, start), None)
    parts: list[Callable[[], list[ScoredPoint]]] = []

    def points(models: Sequence[tuple[ScoredModel, Artifact | None]]) -> list[ScoredPoint]:
        return [ScoredPoint(model, score(model, base), rules) for model, rules in models]

    def trained(
        config: AdaptConfig, rules: Artifact, untrained: Mapping[str, Artifact], tau: int, seed: int
    ) -> list[ScoredPoint]:
        label, made = f"{checkpoint} tau {tau} seed {seed}", {WT: start, **untrained}
        add_settings(run, made, rules, task, cell, config, seed, label)
        asked = [name for name in made if name in config.settings and name not in untrained]
        return points(
            [(ScoredModel(name, made[name], tau=tau, seed=seed), rules) for name in asked]
        )

    def controlled(name: str, seed: int) -> list[ScoredPoint]:
        training = training_of(cell, seed, recipe.max_tokens, recipe.control_config(name))
        questions = Questions(task, ("train", "valid"))
        control = control_stage(control=name, training=training, questions=questions)
        made = run.stage(control, label=f"{checkpoint} {name} seed {seed}")
        return points([(ScoredModel(name, start, made, seed=seed), None)])

    ready: list[tuple[ScoredModel, Artifact | None]] = [(ScoredModel(WT, start), None)]
    for tau in recipe.taus:
        config, label = recipe.adapt_config(tau), f"{checkpoint} tau {tau}"
        rules = run.stage(rules_of_task(task, cell, config), label=label)
        exchange = with_rules_stage(start=start, rules=rules)
        untrained = {
            step.name: run.stage(exchange, label=label, setting=step.name)
            for step in adaptation_steps(recipe.settings)
            if step.training == "none"
        }
        asked = [name for name in untrained if name in recipe.settings]
        ready += [(ScoredModel(name, untrained[name], tau=tau), rules) for name in asked]
        parts += [partial(trained, config, rules, untrained, tau, seed) for seed in recipe.seeds]
    parts += [partial(controlled, *one) for one in product(recipe.controls, recipe.seeds)]
    by_part = run.run_parallel([partial(points, ready), *parts])
    return Curve(checkpoint, start, base, [point for part in by_part for point in part])


def _scored(
    run: AdaptationRun, task: Artifact, checkpoint: str, model: ScoredModel, base: Artifact | None
) -> Artifact:
    """Score the test questions; without a base it is the base itself."""
    of = {"tau": model.tau, "seed": model.seed}
    label = [f"{name} {value}" for name, value in of.items() if value is not None]
    scores = choice_scores_stage(
        questions=Questions(task, ("test",)),
        model=model,
        base=base,
        max_tokens=run.recipe.max_tokens,
        batch_size=run.recipe.batch_size,
    )
    return run.stage(scores, label=" ".join([checkpoint, model.setting, *label]))


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
    return task_rules_stage(
        questions=Questions(task, ("train",)),
        tokenizer=NamedTokenizer(cell.backbone, cell.revision),
        rules=config.rules,
        max_tokens=config.max_tokens,
    )


def add_settings(
    run: PipelineRun,
    made: dict[str, Artifact],
    rules: Artifact,
    task: Artifact,
    cell: Cell,
    config: AdaptConfig,
    seed: int,
    label: str,
) -> None:
    """Make each setting that is missing, of the one that it starts from or of the task's rules."""
    for step in adaptation_steps(config.settings):
        if step.name in made:
            continue
        start = rules if step.start is None else made[step.start]
        if step.training == "none":
            call = with_rules_stage(start=start, rules=rules)
        else:
            optimisation = config.sft if step.training == "sft" else config.dpo
            call = TRAININGS[step.training](
                training=training_of(cell, seed, config.max_tokens, optimisation),
                questions=Questions(task, ("train", "valid")),
                start=start,
            )
        made[step.name] = run.stage(call, label=label, setting=step.name)


def training_of(
    cell: Cell, seed: int, max_tokens: int, optimisation: DistillConfig | PreferenceConfig
) -> ModuleTraining:
    backbone = NamedBackbone(cell.backbone, cell.revision)
    return ModuleTraining(backbone, cell.alone(), optimisation, max_tokens, seed)
