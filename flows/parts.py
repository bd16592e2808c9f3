"""Parts of the flows: the stages in the order in which they depend on each other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flows.adaptation_curves import (
    add_settings,
    measure_adaptation,
    rules_of_task,
    training_of,
)
from tasks.plan.planner import Planner
from tasks.report.compare import (
    CellResult,
    Scores,
    ShippedResult,
    cell_label,
    require_own_names,
    shipped_setting,
)
from tasks.run.checks import check_adaptation, check_headline_positions, why_absent
from tasks.run.pipeline import PipelineRun
from tasks.run.stage import Artifact
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
    confidence_rules_stage,
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
    check_data,
    check_limits,
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
from umim_core.config.evaluate import BenchmarkConfig, EvaluateConfig, HeadlineConfig
from umim_core.config.recipe import AdaptConfig, Cell, Recipe, RunRecipe
from umim_core.config.table_recipe import TableRecipe, TableSetting, TableText
from umim_core.task_sets.generation_spec import TaskOptions
from umim_core.task_sets.spec import TASKS
from umim_core.throughput.throughput import tokens_needed

logger = logging.getLogger("umim.pipeline")
Tasks = dict[str, Artifact]


@dataclass
class Sources:
    """The corpus, and the questions of every task by its name."""

    corpus: Artifact
    tasks: dict[str, Artifact]


def run_everything(run: PipelineRun) -> tuple[list[CellResult], list[ShippedResult]]:
    """Every stage but the report; what a plan walks is what the whole flow runs.

    Shipped checkpoints need no training: they are measured while cells are adapted, which is a
    chain and leaves cores idle. What is timed comes last and runs alone.
    """
    sources = prepare(run)
    results = mine(run, sources)
    shipped = find_shipped(run, sources.corpus)
    for result in results:  # of flows this one alone reads all splits
        _check_text(run, result.tokenized, run.recipe)
    distill(run, results)
    parts: list[Callable[[], ShippedResult | None]] = [*adaptations(run, sources, results)]
    parts += [partial(_measured, run, sources.tasks, *of) for of in shipped]
    measured = [result for result in run.run_parallel(parts) if result is not None]
    evaluate(run, sources, results)
    benchmark(run, results)
    for (name, text, by), result in zip(shipped, measured, strict=True):
        if by.benchmark is not None and measures(shipped_setting(name), "speed"):
            result.benchmark = _timed(run, text, name, by.benchmark, f"{name} (shipped)")
    return results, measured


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
        name: texts[of]
        for name in (recipe.tasks if recipe.task is not None else ())
        if (of := TASKS.find(name).corpus or recipe.corpus.kind) in texts
    }
    questions = {
        name: run.stage(
            task_stage(
                task=NamedTask(name),
                sizes=recipe.task,
                corpus=None if TASKS.find(name).corpus is None else corpus,
            ),
            label=name if len(wanted) > 1 else "",
        )
        for name, corpus in wanted.items()
    }
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


def mine(run: PipelineRun, sources: Sources) -> list[CellResult]:
    """Tokenize and count once per backbone, make rules once per cell."""
    results = []
    for cell in run.recipe.cells:
        tokenized = _tokenized(run, sources.corpus, cell.backbone, cell.revision)
        results.append(CellResult(cell, tokenized, _rules(run, cell, tokenized)))
    return results


def _tokenized(run: PipelineRun, corpus: Artifact, backbone: str, revision: str | None) -> Artifact:
    tokens = tokenize_stage(
        corpus=corpus,
        text=CorpusText(run.recipe.corpus),
        train_tokens=run.recipe.corpus.train_tokens,
        tokenizer=NamedTokenizer(backbone, revision),
    )
    return run.stage(tokens, label=backbone)


def _check_text(run: PipelineRun, text: Artifact, by: Recipe | HeadlineConfig) -> None:
    """Refuse a text that is too short to be measured; a plan has none."""
    if not isinstance(run, Planner):
        timed = 0 if by.benchmark is None else tokens_needed(by.benchmark)
        check_splits(text, run.recipe.segment_length, timed)


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
        spans = run.stage(sure, label=f"{cell.backbone} p > {cell.min_probability:g}")
        rules = confidence_rules_stage(counted=spans, tokenizer=tokenizer, options=options)
        return run.stage(rules, label=label)
    sharing = [
        other
        for other in recipe.cells
        if (other.backbone, other.revision, other.source, other.rules)
        == (cell.backbone, cell.revision, cell.source, None)
    ]
    least = min(other.tau for other in sharing)
    longest = max(other.longest for other in sharing)
    counts = count_stage(
        tokens=tokens,
        tokenizer=tokenizer,
        options=options.model_copy(update={"tau": least, "longest": longest}),
        documents=options.count_documents,
    )
    counted = run.stage(counts, label=cell.backbone)
    rules = filter_stage(counted=counted, tokens=tokens, tokenizer=tokenizer, options=options)
    return run.stage(rules, label=label)


def train(run: PipelineRun) -> tuple[Sources, list[CellResult]]:
    """Everything up to the checkpoint of every cell."""
    sources = prepare(run)
    results = mine(run, sources)
    distill(run, results)
    return sources, results


def distill(run: PipelineRun, results: list[CellResult]) -> None:
    """Distill each cell; whichever ends first, they are registered in the order of the recipe."""
    trained = run.run_parallel([partial(_distilled, run, result) for result in results])
    for result, artifact in zip(results, trained, strict=True):
        result.settings[WT] = artifact
        run.register(result.cell.backbone, artifact)


def _distilled(run: PipelineRun, result: CellResult) -> Artifact:
    recipe = run.recipe
    distilled = distill_stage(
        training=training_of(result.cell, recipe.seed, recipe.segment_length, recipe.distill),
        rules=result.filtered,
        train=result.tokenized.part("train"),
        valid=result.tokenized.part("valid"),
    )
    return run.stage(distilled, label=cell_label(result.cell), setting=WT)


def adaptations(
    run: PipelineRun, sources: Sources, results: list[CellResult]
) -> list[Callable[[], None]]:
    """Return a part for each cell that asks for adaptation."""
    config, task = run.recipe.adapt, next(iter(sources.tasks.values()), None)
    if config is None or task is None:
        return []
    return [partial(_adapted, run, config, task, result) for result in results if result.cell.adapt]


def _adapted(run: PipelineRun, config: AdaptConfig, task: Artifact, result: CellResult) -> None:
    cell, label = result.cell, cell_label(result.cell)
    rules = run.stage(rules_of_task(task, cell, config), label=label)
    made = {WT: result.settings[WT]}
    add_settings(run, made, rules, task, cell, config, run.recipe.seed, label)
    result.settings |= {name: made[name] for name in made if name in config.settings}


def evaluate(run: PipelineRun, sources: Sources, results: list[CellResult]) -> None:
    """Alignment and perplexity per setting; task accuracy of base and every setting."""
    places = [(result, setting) for result in results for setting in (*result.settings, BASE)]
    parts = [partial(_evaluated, run, sources, *place) for place in places]
    # The driver only waits for workers, so there may be a setting for each of them.
    most = max(run.recipe.cluster.parallel_stages, run.recipe.cluster.workers)
    measured = run.run_parallel(parts, most)
    for (result, setting), (evaluation, scores) in zip(places, measured, strict=True):
        result.scores |= scores
        if evaluation is not None:
            result.evaluations[setting] = evaluation


def _evaluated(
    run: PipelineRun, sources: Sources, result: CellResult, setting: str
) -> tuple[Artifact | None, Scores]:
    label = f"{result.cell.backbone if setting == BASE else cell_label(result.cell)} {setting}"
    checkpoint = result.settings.get(setting, result.settings[WT]).path / "checkpoint"
    evaluation, config = None, run.recipe.evaluate
    if setting != BASE and measures(setting, "alignment"):
        evaluation = _aligned(run, result.tokenized, checkpoint, config, label)
    return evaluation, score(run, sources.tasks, setting, checkpoint, label, config)


def _aligned(
    run: PipelineRun,
    tokenized: Artifact,
    checkpoint: Path | str,
    config: EvaluateConfig,
    label: str,
) -> Artifact:
    aligned = evaluate_stage(
        tokens=tokenized,
        checkpoint=NamedCheckpoint(checkpoint),
        config=config,
        segment_length=run.recipe.segment_length,
    )
    return run.stage(aligned, label=label)


def benchmark(run: PipelineRun, results: list[CellResult]) -> None:
    """Throughput of each cell's checkpoint under the setting that is timed."""
    for result in results if run.recipe.benchmark is not None else ():
        for setting, artifact in result.settings.items():
            if measures(setting, "speed"):
                checkpoint, label = artifact.path / "checkpoint", cell_label(result.cell)
                result.benchmark = _timed(
                    run, result.tokenized, checkpoint, run.recipe.benchmark, label
                )


def _timed(
    run: PipelineRun,
    tokenized: Artifact,
    checkpoint: Path | str,
    config: BenchmarkConfig,
    label: str,
) -> Artifact:
    timed = benchmark_stage(tokens=tokenized, checkpoint=NamedCheckpoint(checkpoint), config=config)
    return run.stage(timed, label=label)


def score(
    run: PipelineRun,
    tasks: dict[str, Artifact],
    setting: str,
    checkpoint: Path | str,
    label: str,
    config: EvaluateConfig,
) -> Scores:
    """Score a setting, if the table says so: an adapted one on its own task, others on every task.

    ``config`` says how much.
    """
    first, scores = next(iter(tasks), None), Scores()
    for name, questions in tasks.items() if measures(setting, "accuracy") else ():
        if setting in (BASE, WT) or name == first:
            scored = task_score_stage(
                questions=Questions(questions),
                checkpoint=NamedCheckpoint(checkpoint, base=setting == BASE),
                merge="none" if setting == BASE else TASKS.find(name).merge,
                limit=config.task_questions,
            )
            shown = label if name == first else f"{label}, {name}"
            scores[name, setting] = run.stage(scored, label=shown)
    return scores


def find_shipped(
    run: PipelineRun, corpus: Artifact
) -> list[tuple[str, Artifact, Recipe | HeadlineConfig]]:
    """Shipped checkpoints, the corpus in the ids of each one's tokenizer, what says how much.

    A run fetches the headline's backbone where it is not on this machine, a plan does not.
    """
    recipe, headline = run.recipe, run.recipe.headline
    wanted: list[tuple[str, Recipe | HeadlineConfig]] = [(name, recipe) for name in recipe.shipped]
    if headline is not None:
        reason = why_absent(headline.checkpoint, local_files_only=isinstance(run, Planner))
        if reason is None:
            check_headline_positions(recipe, headline)  # it may have been fetched just now
            names = (headline.checkpoint, *headline.beside)
            wanted = [*((name, headline) for name in names), *wanted]
        else:
            logger.warning("the row of %s is left out: %s", headline.checkpoint, reason)
    shipped = []
    for name, by in wanted:
        config = read_config(resolve_checkpoint(name))
        text = _tokenized(run, corpus, config.backbone, config.backbone_revision)
        _check_text(run, text, by)
        shipped.append((name, text, by))
    return shipped


def _measured(
    run: PipelineRun, tasks: Tasks, name: str, text: Artifact, by: Recipe | HeadlineConfig
) -> ShippedResult:
    """Measure a shipped checkpoint, all but its speed, as cells are measured."""
    scores, label = Scores(), f"{name} (shipped)"
    evaluation = _aligned(run, text, name, by.evaluate, label)
    for setting in (shipped_setting(name), BASE):
        scores |= score(run, tasks, setting, name, f"{label} {setting}", by.evaluate)
    return ShippedResult(name, text, evaluation, scores, leads=by is not run.recipe)


def measure_table(run: PipelineRun[TableRecipe]) -> Artifact:
    """Questions of every task; every task under every setting, and every text; the table."""
    recipe = run.recipe
    check_data(recipe)
    check_limits(recipe)
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
    scores = {(task, of.name): score for (task, of), score in zip(places, artifacts, strict=False)}
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
    if setting.mine_tau is not None:
        mined = run.stage(
            mined_stage(
                data=data,
                questions=questions,
                checkpoint=NamedCheckpoint(place),
                backbone=named_backbone(recipe),
                tau=setting.mine_tau,
                options=TaskOptions(recipe.seed, task_new_tokens=recipe.new_tokens),
            ),
            label=label,
        )
        if (own := mined.path / "checkpoint").is_dir():  # a task that is not run has none
            place = own
    answered = shards_stage(
        data=data,
        questions=questions,
        setting=setting,
        method=None if setting.method is None else NamedMethod(setting.method),
        checkpoint=NamedCheckpoint(place, base=setting.merge == "none"),
        backbone=named_backbone(recipe),
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
        checkpoint=NamedCheckpoint(recipe.checkpoint),
        backbone=named_backbone(recipe),
        batch_size=recipe.batch_size,
        cores=recipe.cores,
    )
    return run.stage(measured, label=name)
