"""Parts of the flows: the stages in the order in which they depend on each other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flows.adaptation_curves import add_settings, measure_adaptation, rules_of_task, training_of
from tasks.plan.planner import Planner
from tasks.report.compare import Result, cell_label, require_own_names
from tasks.run.checks import check_adaptation, check_headline_positions, why_absent
from tasks.run.pipeline import PipelineRun
from tasks.run.stage import Artifact, Part
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
from tasks.stages.train import distill_stage
from umim_core.adaptation.settings import BASE, WT, measures
from umim_core.checkpoint.checkpoint_files import read_config, resolve_checkpoint
from umim_core.config.adaptation_recipe import AdaptationRecipe
from umim_core.config.corpus import Corpus, GeneratedCorpus, MixtureCorpus
from umim_core.config.evaluate import HeadlineConfig
from umim_core.config.recipe import AdaptConfig, Cell, Recipe, RunRecipe
from umim_core.config.table_recipe import TableRecipe, TableSetting, TableText
from umim_core.task_sets.generation_spec import TaskOptions
from umim_core.task_sets.spec import TASKS
from umim_core.throughput.throughput import tokens_needed

logger = logging.getLogger("umim.pipeline")


@dataclass
class Sources:
    """The corpus, and the questions of every task by its name."""

    corpus: Artifact
    tasks: dict[str, Artifact]


def run_everything(run: PipelineRun) -> list[Result]:
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


def plan(recipe: RunRecipe) -> list[dict[str, str]]:
    """Return the stages of a recipe in order, each with what it works on."""
    planner = Planner(recipe)
    if isinstance(recipe, TableRecipe):
        measure_table(planner)
    elif isinstance(recipe, AdaptationRecipe):
        check_adaptation(recipe)
        measure_adaptation(planner)
    else:
        run_everything(planner)
        return [*planner.steps, {"stage": "report", "of": recipe.name}]
    return planner.steps


def prepare(run: PipelineRun) -> Sources:
    """Corpus, after what it is made of, and the tasks whose questions it has."""
    recipe = run.recipe
    require_own_names(recipe.name, recipe.cells)
    texts = _texts(run, recipe.corpus)
    wanted = {
        name: texts[kind]
        for name in (recipe.tasks if recipe.task is not None else ())
        if (kind := TASKS.find(name).corpus or recipe.corpus.kind) in texts
    }
    questions = {}
    for name, corpus in wanted.items():
        own = None if TASKS.find(name).corpus is None else corpus
        call = task_stage(task=NamedTask(name), sizes=recipe.task, corpus=own)
        questions[name] = run.stage(call, label=name if len(wanted) > 1 else "")
    return Sources(texts[recipe.corpus.kind], questions)


def _texts(run: PipelineRun, corpus: Corpus) -> dict[str, Artifact]:
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


def mine(run: PipelineRun, sources: Sources) -> list[Result]:
    """Tokenize and count once per backbone, make rules once per cell."""
    results = []
    for cell in run.recipe.cells:
        tokenized = _tokenized(run, sources.corpus, cell.backbone, cell.revision)
        results.append(Result(cell, tokenized, _rules(run, cell, tokenized)))
    return results


def _tokenized(run: PipelineRun, corpus: Artifact, backbone: str, revision: str | None) -> Artifact:
    tokens = tokenize_stage(
        corpus=corpus,
        text=CorpusText(run.recipe.corpus),
        train_tokens=run.recipe.corpus.train_tokens,
        tokenizer=NamedTokenizer(backbone, revision),
    )
    return run.stage(tokens, label=backbone)


def _amounts(run: PipelineRun, result: Result) -> Recipe | HeadlineConfig:
    """What says how much of a result is measured."""
    headline = run.recipe.headline
    return headline if result.leads and headline is not None else run.recipe


def _check_text(run: PipelineRun, result: Result) -> None:
    """Refuse a text that is too short to be measured; a plan has none."""
    if not isinstance(run, Planner):
        config = _amounts(run, result).benchmark
        timed = 0 if config is None else tokens_needed(config)
        check_splits(result.tokenized, run.recipe.segment_length, timed)


def _rules(run: PipelineRun, cell: Cell, tokenized: Artifact) -> Artifact:
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
        counted = _counted(run, cell, tokens, tokenizer)
    rules = filter_stage(counted=counted, tokens=tokens, tokenizer=tokenizer, options=options)
    return run.stage(rules, label=label)


def _counted(run: PipelineRun, cell: Cell, tokens: Part, tokenizer: NamedTokenizer) -> Artifact:
    """Count once for all cells of a backbone, down to the least threshold of them."""
    recipe = run.recipe
    options = recipe.rule_options(cell)
    same = (cell.backbone, cell.revision, cell.source, None)
    sharing = [
        other
        for other in recipe.cells
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


def train(run: PipelineRun) -> tuple[Sources, list[Result]]:
    """Everything up to the checkpoint of every cell."""
    sources = prepare(run)
    results = mine(run, sources)
    distill(run, results)
    return sources, results


def distill(run: PipelineRun, results: list[Result]) -> None:
    """Distill each cell; whichever ends first, they are registered in the order of the recipe."""
    trained = run.run_parallel([partial(_distilled, run, result) for result in results])
    for result, artifact in zip(results, trained, strict=True):
        result.settings[WT] = artifact
        run.register(result.cell.backbone, artifact)


def _distilled(run: PipelineRun, result: Result) -> Artifact:
    recipe = run.recipe
    distilled = distill_stage(
        training=training_of(result.cell, recipe.seed, recipe.segment_length, recipe.distill),
        rules=result.filtered,
        train=result.tokenized.part("train"),
        valid=result.tokenized.part("valid"),
    )
    return run.stage(distilled, label=result.called, setting=WT)


def adaptations(
    run: PipelineRun, sources: Sources, results: list[Result]
) -> list[Callable[[], None]]:
    """Return a part for each cell that asks for adaptation."""
    config, task = run.recipe.adapt, next(iter(sources.tasks.values()), None)
    if config is None or task is None:
        return []
    return [partial(_adapted, run, config, task, result) for result in results if result.cell.adapt]


def _adapted(run: PipelineRun, config: AdaptConfig, task: Artifact, result: Result) -> None:
    cell, label = result.cell, result.called
    rules = run.stage(rules_of_task(task, cell, config), label=label)
    made = {WT: result.settings[WT]}
    add_settings(run, made, rules, task, cell, config, run.recipe.seed, label)
    result.settings |= {name: made[name] for name in made if name in config.settings}


def evaluate(run: PipelineRun, sources: Sources, results: list[Result]) -> None:
    """Alignment and perplexity per setting; task accuracy of base and every setting."""
    # The driver only waits for workers, so there may be a setting for each of them.
    most = max(run.recipe.cluster.parallel_stages, run.recipe.cluster.workers)
    run.run_parallel(evaluations(run, sources, results), most)


def evaluations(
    run: PipelineRun, sources: Sources, results: list[Result]
) -> list[Callable[[], None]]:
    """Return a part for each setting of each result, and for its base model."""
    return [
        partial(_evaluated, run, sources.tasks, result, setting)
        for result in results
        for setting in (*result.checkpoints, BASE)
    ]


def _evaluated(run: PipelineRun, tasks: dict[str, Artifact], result: Result, setting: str) -> None:
    """Measure a setting: an adapted one is scored on its own task, others on every task."""
    config = _amounts(run, result).evaluate
    alone = setting == BASE and result.cell is not None
    label = f"{result.cell.backbone if alone else result.called} {setting}"
    first = next(iter(tasks), None)
    checkpoint = result.checkpoints.get(setting) or next(iter(result.checkpoints.values()))
    if setting != BASE and measures(setting, "alignment"):
        aligned = evaluate_stage(
            tokens=result.tokenized,
            checkpoint=NamedCheckpoint(checkpoint),
            config=config,
            segment_length=run.recipe.segment_length,
        )
        result.evaluations[setting] = run.stage(aligned, label=label)
    for task, questions in tasks.items() if measures(setting, "accuracy") else ():
        if setting in (BASE, WT) or task == first:
            scored = task_score_stage(
                questions=Questions(questions),
                checkpoint=NamedCheckpoint(checkpoint, base=setting == BASE),
                merge="none" if setting == BASE else TASKS.find(task).merge,
                limit=config.task_questions,
            )
            shown = label if task == first else f"{label}, {task}"
            result.scores[task, setting] = run.stage(scored, label=shown)


def benchmark(run: PipelineRun, results: list[Result]) -> None:
    """Throughput of each checkpoint under the setting that is timed."""
    for result in results:
        config = _amounts(run, result).benchmark
        for setting, checkpoint in result.checkpoints.items() if config is not None else ():
            if measures(setting, "speed"):
                timed = benchmark_stage(
                    tokens=result.tokenized, checkpoint=NamedCheckpoint(checkpoint), config=config
                )
                result.benchmark = run.stage(timed, label=result.called)


def find_shipped(run: PipelineRun, corpus: Artifact) -> list[Result]:
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
        config = read_config(resolve_checkpoint(name))
        text = _tokenized(run, corpus, config.backbone, config.backbone_revision)
        shipped.append(Result(None, text, name=name, leads=number < len(leading)))
        _check_text(run, shipped[-1])
    return shipped


def measure_table(run: PipelineRun[TableRecipe]) -> Artifact:
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
    # The driver only waits for workers, so there may be a cell for each of them.
    most = max(recipe.cluster.parallel_stages, recipe.cluster.workers)
    artifacts = run.run_parallel([*parts, *texts], most)
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


def _answered(
    run: PipelineRun[TableRecipe], questions: Artifact, task: str, setting: TableSetting
) -> Artifact:
    """Score a task under a setting, whose rules may be mined from the task's prompts first."""
    recipe, label, data = run.recipe, f"{task} {setting.name}", TableQuestions(run.recipe, task)
    place: Path | str = recipe.checkpoint
    checkpoint = partial(NamedCheckpoint, backbone=named_backbone(recipe))
    if setting.mine_tau is not None:
        mining = mined_stage(
            data=data,
            questions=questions,
            checkpoint=checkpoint(place),
            tau=setting.mine_tau,
            options=TaskOptions(task_seed=recipe.seed, task_new_tokens=recipe.new_tokens),
        )
        own = run.stage(mining, label=label).path / "checkpoint"
        if own.is_dir():  # a task that is not run has none
            place = own
    answered = shards_stage(
        data=data,
        questions=questions,
        setting=setting,
        method=None if setting.method is None else NamedMethod(setting.method),
        checkpoint=checkpoint(place, base=setting.merge == "none"),
        limit=recipe.questions,
        shard=recipe.shard,
        batch_size=recipe.batch_size,
        cores=recipe.cores,
    )
    return run.stage(answered, label=label)


def _read(run: PipelineRun[TableRecipe], name: str, text: TableText) -> Artifact:
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
