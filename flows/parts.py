"""Parts of the flows: the stages in the order in which they depend on each other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from flows.planner import Planner
from tasks.report.comparison import CellResult, Result, cell_label, require_own_names
from tasks.run.checks import check_headline_positions, why_absent
from tasks.run.pipeline import PipelineRun
from tasks.run.recipes import find_recipe, recipe_names
from tasks.run.stage import Artifact, Part
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
from tasks.stages.corpus import (
    CorpusText,
    check_splits,
    corpus_stage,
    mixture_stage,
    task_stage,
    tokenize_stage,
)
from tasks.stages.evaluate import benchmark_stage, evaluate_stage, task_score_stage
from tasks.stages.generate import Generation, generate_stage
from tasks.stages.mine import (
    confidence_stage,
    count_stage,
    filter_stage,
    given_rules_stage,
)
from tasks.stages.named import (
    NamedBackbone,
    NamedBase,
    NamedCheckpoint,
    NamedMethod,
    NamedRules,
    NamedTask,
    NamedTokenizer,
    Questions,
    ReadFiles,
)
from tasks.stages.table import (
    TableQuestions,
    check_tasks,
    mined_stage,
    named_backbone,
    questions_stage,
    shards_stage,
    table_header,
    table_stage,
    text_stage,
)
from tasks.stages.train import (
    TRAININGS,
    ModuleTraining,
    control_stage,
    distill_stage,
    task_rules_stage,
    with_rules_stage,
)
from umim_core.adaptation.settings import BASE, WT, adaptation_steps, measures
from umim_core.checkpoint.checkpoint_files import named_config
from umim_core.checkpoint.checkpoint_index import own_name
from umim_core.config.adaptation_recipe import AdaptationRecipe, DocstringQuestions
from umim_core.config.corpus import Corpus, DocstringCorpus, GeneratedCorpus, MixtureCorpus
from umim_core.config.evaluate import HeadlineConfig
from umim_core.config.recipe import (
    DEFAULT_TASK,
    AdaptConfig,
    Cell,
    DistillConfig,
    PreferenceConfig,
    Recipe,
)
from umim_core.config.recipe_files import AnyRecipe
from umim_core.config.rule_options import RuleOptions
from umim_core.config.table_recipe import TableRecipe, TableSetting, TableText
from umim_core.errors import CheckpointError
from umim_core.task_sets.generation_spec import TaskOptions
from umim_core.task_sets.spec import TASKS
from umim_core.throughput.throughput import tokens_needed

logger = logging.getLogger("umim.pipeline")
Run = PipelineRun[Recipe] | Planner[Recipe]
TableRun = PipelineRun[TableRecipe] | Planner[TableRecipe]
AdaptationRun = PipelineRun[AdaptationRecipe] | Planner[AdaptationRecipe]
Starts = dict[tuple[str, str | None], Artifact]  # by backbone and revision


@dataclass
class Sources:
    """The corpus, and the questions of every task by its name."""

    corpus: Artifact
    tasks: dict[str, Artifact]


def run_everything(run: Run) -> list[Result]:
    """Every stage but the report; what a plan walks is what the whole flow runs.

    Shipped checkpoints need no training: they are measured while cells are adapted, which is a
    chain and leaves cores idle. What is timed comes last and runs alone.

    Returns:
        What the comparison has rows of: the headline, the cells, other shipped checkpoints.
    """
    sources = prepare(run)
    cells = mine(run, sources)
    shipped = find_shipped(run, sources.corpus)
    for result in cells:  # of flows this one alone reads all splits
        _check_text(run, result)
    distill(run, cells)
    run.run_parallel([*adaptations(run, sources, cells), *evaluations(run, sources, shipped)])
    evaluate(run, sources, cells)
    benchmark(run, [*cells, *shipped])
    leading = [each for each in shipped if each.leads]
    others = [each for each in shipped if not each.leads]
    return [*leading, *cells, *others]


def plan(recipe: AnyRecipe) -> list[dict[str, str]]:
    """Return the stages of a recipe in order, each with what it works on."""
    if isinstance(recipe, TableRecipe):
        table = Planner(recipe)
        measure_table(table)
        return table.steps
    if isinstance(recipe, AdaptationRecipe):
        curves = Planner(recipe)
        measure_adaptation(curves)
        return curves.steps
    everything = Planner(recipe)
    run_everything(everything)
    return [*everything.steps, {"stage": "report", "of": recipe.name}]


def prepare(run: Run) -> Sources:
    """Corpus, after what it is made of, and the tasks whose questions it has."""
    recipe = run.recipe
    require_own_names(recipe.name, recipe.cells)
    texts = _texts(run, recipe.corpus)
    sources = Sources(texts[recipe.corpus.kind], {})
    if recipe.task is None:
        return sources
    wanted = {
        name: texts[kind]
        for name in recipe.tasks
        if (kind := TASKS.find(name).corpus or recipe.corpus.kind) in texts
    }
    for name, corpus in wanted.items():
        own = None if TASKS.find(name).corpus is None else corpus
        call = task_stage(task=NamedTask(name), sizes=recipe.task, corpus=own)
        sources.tasks[name] = run.stage(call, label=name if len(wanted) > 1 else "")
    return sources


def _texts(run: Run, corpus: Corpus) -> dict[str, Artifact]:
    """Corpora by kind: the recipe's, and the embedded one where that is a part of it."""
    text = CorpusText(corpus)
    if isinstance(corpus, MixtureCorpus):
        texts, docstrings = {}, corpus.docstrings
        if docstrings is not None:
            embedded = corpus_stage(text=CorpusText(docstrings))
            texts[docstrings.kind] = run.stage(embedded, label=docstrings.kind)
        mixture = mixture_stage(text=text, docstrings=next(iter(texts.values()), None))
        return texts | {corpus.kind: run.stage(mixture)}
    generated = None
    if isinstance(corpus, GeneratedCorpus):
        generated = run.stage(generate_stage(generation=Generation(corpus)), label=corpus.model)
    return {corpus.kind: run.stage(corpus_stage(text=text, generated=generated))}


def mine(run: Run, sources: Sources) -> list[CellResult]:
    """Tokenize and count once per backbone, make rules once per cell."""
    results = []
    for cell in run.recipe.cells:
        tokenized = _tokenized(run, sources.corpus, cell.backbone, cell.revision)
        results.append(CellResult(cell, tokenized, _rules(run, cell, tokenized)))
    return results


def _tokenized(run: Run, corpus: Artifact, backbone: str, revision: str | None) -> Artifact:
    tokens = tokenize_stage(
        corpus=corpus,
        text=CorpusText(run.recipe.corpus),
        train_tokens=run.recipe.corpus.train_tokens,
        tokenizer=NamedTokenizer(backbone, revision),
    )
    return run.stage(tokens, label=backbone)


def _amounts(run: Run, result: Result) -> Recipe | HeadlineConfig:
    """What says how much of a result is measured."""
    headline = run.recipe.headline
    return headline if result.leads and headline is not None else run.recipe


def _check_text(run: Run, result: Result) -> None:
    """Refuse a text that is too short to be measured; a plan has none."""
    if not isinstance(run, Planner):
        config = _amounts(run, result).benchmark
        timed = 0 if config is None else tokens_needed(config)
        check_splits(result.tokenized, run.recipe.segment_length, timed)


def _rules(run: Run, cell: Cell, tokenized: Artifact) -> Artifact:
    recipe, label, tokens = run.recipe, cell_label(cell), tokenized.part("train")
    backbone = NamedBackbone(cell.backbone, cell.revision)
    tokenizer = backbone.tokenizer
    if cell.rules is not None:
        given = given_rules_stage(tokenizer=tokenizer, rules=NamedRules(cell.rules))
        return run.stage(given, label=label)
    options = recipe.rule_options(cell)
    if cell.source == "confidence":
        sure = confidence_stage(tokens=tokens, backbone=backbone, options=options)
        counted = run.stage(sure, label=f"{cell.backbone} p > {cell.min_probability:g}")
    else:
        counted = _counted(run, cell, options, tokens, tokenizer)
    rules = filter_stage(counted=counted, tokens=tokens, tokenizer=tokenizer, options=options)
    return run.stage(rules, label=label)


def _counted(
    run: Run, cell: Cell, options: RuleOptions, tokens: Part, tokenizer: NamedTokenizer
) -> Artifact:
    """Count once for all cells of a backbone, down to the least threshold of them."""
    same = (cell.backbone, cell.revision, cell.source, None)
    sharing = [
        other
        for other in run.recipe.cells
        if (other.backbone, other.revision, other.source, other.rules) == same
    ]
    least = min(other.tau for other in sharing)
    longest = max(other.longest for other in sharing)
    counts = count_stage(
        tokens=tokens,
        tokenizer=tokenizer,
        options=options.model_copy(update={"tau": least, "longest": longest}),
        documents=options.count_documents,
    )
    return run.stage(counts, label=cell.backbone)


def train(run: Run) -> tuple[Sources, list[CellResult]]:
    """Everything up to the checkpoint of every cell."""
    sources = prepare(run)
    results = mine(run, sources)
    distill(run, results)
    return sources, results


def distill(run: Run, results: Sequence[CellResult]) -> None:
    """Distill each cell; whichever ends first, they are registered in the order of the recipe."""
    trained = run.run_parallel([partial(_distilled, run, result) for result in results])
    for result, artifact in zip(results, trained, strict=True):
        result.settings[WT] = artifact
        run.register(result.cell.backbone, artifact)


def _distilled(run: Run, result: CellResult) -> Artifact:
    recipe = run.recipe
    distilled = distill_stage(
        training=training_of(result.cell, recipe.seed, recipe.segment_length, recipe.distill),
        rules=result.filtered,
        train=result.tokenized.part("train"),
        valid=result.tokenized.part("valid"),
    )
    return run.stage(distilled, label=result.called, setting=WT)


def adaptations(
    run: Run, sources: Sources, results: Sequence[CellResult]
) -> list[Callable[[], None]]:
    config, task = run.recipe.adapt, next(iter(sources.tasks.values()), None)
    if config is None or task is None:
        return []
    return [partial(_adapted, run, config, task, result) for result in results if result.cell.adapt]


def _adapted(run: Run, config: AdaptConfig, task: Artifact, result: CellResult) -> None:
    adaptation, label = TaskAdaptation(run, task, result.cell, config), result.called
    rules, start = adaptation.rules(label), {WT: result.settings[WT]}
    made = adaptation.settings(start, rules, run.recipe.seed, label)
    result.settings |= {name: made[name] for name in made if name in config.settings}


def evaluate(run: Run, sources: Sources, results: Sequence[Result]) -> None:
    """Alignment and perplexity per setting; task accuracy of base and every setting."""
    run.run_parallel(evaluations(run, sources, results), on_workers=True)


def evaluations(run: Run, sources: Sources, results: Sequence[Result]) -> list[Callable[[], None]]:
    return [
        partial(_evaluated, run, sources.tasks, result, setting)
        for result in results
        for setting in (*result.checkpoints, BASE)
    ]


def _evaluated(run: Run, tasks: dict[str, Artifact], result: Result, setting: str) -> None:
    """Measure a setting: an adapted one is scored on its own task, others on every task."""
    config = _amounts(run, result).evaluate
    cell, checkpoints = result.cell or cell_of(result.name), result.checkpoints
    label = f"{cell.backbone if setting == BASE else result.called} {setting}"
    checkpoint = (
        NamedBase(next(iter(checkpoints.values())), cell.backbone, cell.revision)
        if setting == BASE
        else NamedCheckpoint(checkpoints[setting])
    )
    first = next(iter(tasks), None)
    if measures(setting, "alignment"):
        aligned = evaluate_stage(
            tokens=result.tokenized,
            checkpoint=checkpoint,
            config=config,
            segment_length=run.recipe.segment_length,
        )
        result.evaluations[setting] = run.stage(aligned, label=label)
    for task, questions in tasks.items() if measures(setting, "accuracy") else ():
        if setting in (BASE, WT) or task == first:
            scored = task_score_stage(
                questions=Questions(questions),
                checkpoint=checkpoint,
                merge="none" if setting == BASE else TASKS.find(task).merge,
                limit=config.task_questions,
            )
            shown = label if task == first else f"{label}, {task}"
            result.scores[task, setting] = run.stage(scored, label=shown)


def benchmark(run: Run, results: Sequence[Result]) -> None:
    """Throughput of each checkpoint under the setting that is timed."""
    for result in results:
        config = _amounts(run, result).benchmark
        if config is None:
            continue
        for setting, checkpoint in result.checkpoints.items():
            if measures(setting, "speed"):
                timed = benchmark_stage(
                    tokens=result.tokenized, checkpoint=NamedCheckpoint(checkpoint), config=config
                )
                result.benchmark = run.stage(timed, label=result.called)


def find_shipped(run: Run, corpus: Artifact) -> list[Result]:
    """Shipped checkpoints, each with the corpus in the ids of its tokenizer; the headline leads.

    A run fetches the headline's backbone where it is not on this machine, a plan does not.
    """
    recipe, headline, leading = run.recipe, run.recipe.headline, list[str]()
    if headline is not None:
        reason = why_absent(headline.checkpoint, local_files_only=isinstance(run, Planner))
        if reason is None:
            check_headline_positions(recipe, headline)  # it may have been fetched just now
            leading = [headline.checkpoint, *headline.beside]
        else:
            logger.warning("the row of %s is left out: %s", headline.checkpoint, reason)
    shipped = []
    for number, name in enumerate([*leading, *recipe.shipped]):
        config = named_config(name)
        text = _tokenized(run, corpus, config.backbone, config.backbone_revision)
        shipped.append(Result(None, text, name=name, leads=number < len(leading)))
        _check_text(run, shipped[-1])
    return shipped


def measure_table(run: TableRun) -> Artifact:
    """Questions of every task; every task under every setting, and every text; the table."""
    recipe = run.recipe
    check_tasks(recipe)
    questions = {
        task: run.stage(questions_stage(data=TableQuestions(recipe, task)), label=task)
        for task in recipe.tasks
    }
    places = [(task, setting) for task in recipe.tasks for setting in recipe.settings]
    parts = [partial(_answered, run, questions[task], task, setting) for task, setting in places]
    texts = [partial(_read, run, name, text) for name, text in recipe.texts.items()]
    artifacts = run.run_parallel([*parts, *texts], on_workers=True)
    scores = {
        (task, setting.name): score
        for (task, setting), score in zip(places, artifacts, strict=False)
    }
    measured = dict(zip(recipe.texts, artifacts[len(places) :], strict=True))
    table = table_stage(
        header=table_header(recipe),
        checkpoint=NamedCheckpoint(recipe.checkpoint),
        questions=questions,
        scores=scores,
        texts=measured,
    )
    return run.stage(table)


def _answered(run: TableRun, questions: Artifact, task: str, setting: TableSetting) -> Artifact:
    """Score a task under a setting, whose rules may be mined from the task's prompts first."""
    recipe, label, data = run.recipe, f"{task} {setting.name}", TableQuestions(run.recipe, task)
    place: Path | str = recipe.checkpoint
    backbone = named_backbone(recipe)
    if setting.mine_tau is not None:
        mining = mined_stage(
            data=data,
            questions=questions,
            checkpoint=NamedCheckpoint(place, backbone),
            tau=setting.mine_tau,
            options=TaskOptions(task_seed=recipe.seed, task_new_tokens=recipe.new_tokens),
        )
        own = run.stage(mining, label=label).path / "checkpoint"
        if own.is_dir():  # a task that is not run has none
            place = own
    named = NamedBase if setting.merge == "none" else NamedCheckpoint
    answered = shards_stage(
        data=data,
        questions=questions,
        setting=setting,
        method=None if setting.method is None else NamedMethod(setting.method),
        checkpoint=named(place, backbone),
        limit=recipe.questions,
        shard=recipe.shard,
        batch_size=recipe.batch_size,
        cores=recipe.cores,
    )
    return run.stage(answered, label=label)


def _read(run: TableRun, name: str, text: TableText) -> Artifact:
    recipe = run.recipe
    measured = text_stage(
        text=text,
        files=ReadFiles({"text": text.source}),
        methods=[NamedMethod(method) for method in text.methods],
        checkpoint=NamedCheckpoint(recipe.checkpoint, backbone=named_backbone(recipe)),
        batch_size=recipe.batch_size,
        cores=recipe.cores,
    )
    return run.stage(measured, label=name)


def measure_adaptation(run: AdaptationRun) -> Artifact:
    """Questions; every setting, threshold, seed and control of every checkpoint; the curves."""
    task, starts = _questions(run), Starts()
    curves = [_measured(run, task, checkpoint, starts) for checkpoint in run.recipe.checkpoints]
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


def _measured(run: AdaptationRun, task: Artifact, checkpoint: str, starts: Starts) -> Curve:
    """Measure one curve: rules first, then trainings that do not depend on each other.

    Base model and controls are read from the first checkpoint of their backbone (``starts``), so
    that a plan knows them for the same.
    """
    recipe, cell = run.recipe, _cell(checkpoint)
    start = run.stage(start_stage(checkpoint=NamedCheckpoint(checkpoint)), label=checkpoint)
    score = partial(_scored, run, task, checkpoint)
    backbone = starts.setdefault((cell.backbone, cell.revision), start)
    base = score(ScoredModel(BASE, backbone), None)

    def points(models: Sequence[tuple[ScoredModel, Artifact | None]]) -> list[ScoredPoint]:
        return [ScoredPoint(model, score(model, base), rules) for model, rules in models]

    def trained(
        adaptation: TaskAdaptation, rules: Artifact, untrained: Mapping[str, Artifact], seed: int
    ) -> list[ScoredPoint]:
        tau = adaptation.config.rules.tau
        label = f"{checkpoint} tau {tau} seed {seed}"
        made = adaptation.settings({WT: start, **untrained}, rules, seed, label)
        asked = [name for name in made if name in recipe.settings and name not in untrained]
        return points(
            [(ScoredModel(name, made[name], tau=tau, seed=seed), rules) for name in asked]
        )

    def controlled(name: str, seed: int) -> list[ScoredPoint]:
        training = training_of(cell, seed, recipe.max_tokens, recipe.control_config(name))
        questions = Questions(task, ("train", "valid"))
        control = control_stage(control=name, training=training, questions=questions)
        made = run.stage(control, label=f"{checkpoint} {name} seed {seed}")
        return points([(ScoredModel(name, backbone, made, seed=seed), None)])

    ready: list[tuple[ScoredModel, Artifact | None]] = [(ScoredModel(WT, start), None)]
    parts: list[Callable[[], list[ScoredPoint]]] = [partial(points, ready)]
    for tau in recipe.taus:
        adaptation = TaskAdaptation(run, task, cell, recipe.adapt_config(tau))
        label = f"{checkpoint} tau {tau}"
        rules = adaptation.rules(label)
        exchange = with_rules_stage(start=start, rules=rules)
        untrained = {
            step.name: run.stage(exchange, label=label, setting=step.name)
            for step in adaptation_steps(recipe.settings)
            if step.training == "none"
        }
        asked = [name for name in untrained if name in recipe.settings]
        ready += [(ScoredModel(name, untrained[name], tau=tau), rules) for name in asked]
        parts += [partial(trained, adaptation, rules, untrained, seed) for seed in recipe.seeds]
    parts += [partial(controlled, *one) for one in product(recipe.controls, recipe.seeds)]
    by_part = run.run_parallel(parts)
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


@dataclass(frozen=True)
class TaskAdaptation:
    """Adaptation of one module to a task."""

    run: Run | AdaptationRun
    task: Artifact
    cell: Cell
    config: AdaptConfig

    def rules(self, label: str) -> Artifact:
        mined = task_rules_stage(
            questions=Questions(self.task, ("train",)),
            tokenizer=NamedTokenizer(self.cell.backbone, self.cell.revision),
            rules=self.config.rules,
            max_tokens=self.config.max_tokens,
        )
        return self.run.stage(mined, label=label)

    def settings(
        self, made: Mapping[str, Artifact], rules: Artifact, seed: int, label: str
    ) -> dict[str, Artifact]:
        """Return settings with each that is missing, of what it starts from or the task's rules."""
        made, config = dict(made), self.config
        for step in adaptation_steps(config.settings):
            if step.name in made:
                continue
            start = rules if step.start is None else made[step.start]
            if step.training == "none":
                call = with_rules_stage(start=start, rules=rules)
            else:
                optimisation = config.sft if step.training == "sft" else config.dpo
                call = TRAININGS[step.training](
                    training=training_of(self.cell, seed, config.max_tokens, optimisation),
                    questions=Questions(self.task, ("train", "valid")),
                    start=start,
                )
            made[step.name] = self.run.stage(call, label=label, setting=step.name)
        return made


def training_of(
    cell: Cell, seed: int, max_tokens: int, optimisation: DistillConfig | PreferenceConfig
) -> ModuleTraining:
    backbone = NamedBackbone(cell.backbone, cell.revision)
    return ModuleTraining(backbone, cell.alone(), optimisation, max_tokens, seed)
