"""Parts of the flows: the stages in the order in which they depend on each other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from flows.adaptation_curves import measure_adaptation
from flows.scoring import score
from flows.shipped import benchmark_shipped, find_shipped, measurements
from flows.table import measure_table
from tasks.plan.planner import Planner
from tasks.report.compare import CellResult, ShippedResult, cell_label
from tasks.run.checks import check_adaptation
from tasks.run.pipeline import PipelineRun
from tasks.run.side_by_side import Part
from tasks.run.stage import Artifact
from tasks.stages.adapt import TRAININGS, task_rules_stage, with_rules_stage
from tasks.stages.benchmark import benchmark_stage
from tasks.stages.confidence import confidence_rules_stage, confidence_stage
from tasks.stages.corpus import corpus_stage, mixture_stage, task_stage, tokenize_stage
from tasks.stages.distill import distill_stage
from tasks.stages.evaluate import evaluate_stage
from tasks.stages.generate import generate_stage
from tasks.stages.mine import count_stage, filter_stage, given_rules_stage
from umim_core.adaptation.settings import BASE, WT, adaptation_steps, measures
from umim_core.config.adaptation_recipe import AdaptationRecipe
from umim_core.config.corpus import Corpus, GeneratedCorpus, MixtureCorpus
from umim_core.config.recipe import AdaptConfig, Cell, RunRecipe
from umim_core.config.table_recipe import TableRecipe
from umim_core.task_sets.spec import TASKS


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
    distill(run, results)
    run.run_parallel(
        [*adaptations(run, sources, results), *measurements(run, sources.tasks, shipped)]
    )
    evaluate(run, sources, results)
    benchmark(run, results)
    return results, benchmark_shipped(run, shipped)


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
    texts = _texts(run, recipe.corpus)
    corpus = texts[recipe.corpus.kind]
    wanted = {
        name: texts[of]
        for name in (recipe.tasks if recipe.task is not None else ())
        if (of := TASKS.find(name).corpus or recipe.corpus.kind) in texts
    }
    labels = [""] if len(wanted) == 1 else list(wanted)
    return Sources(
        corpus,
        {
            name: run.stage(task_stage, text, recipe.task, name, label=label)
            for (name, text), label in zip(wanted.items(), labels, strict=True)
        },
    )


def _texts(run: PipelineRun, corpus: Corpus) -> dict[str, Artifact]:
    """Corpora by kind: the recipe's, and the embedded one where that is a part of it."""
    if isinstance(corpus, MixtureCorpus):
        docstrings = corpus.docstrings
        if docstrings is None:
            return {corpus.kind: run.stage(mixture_stage, corpus, None)}
        docstring_corpus = run.stage(corpus_stage, docstrings, label=docstrings.kind)
        return {
            docstrings.kind: docstring_corpus,
            corpus.kind: run.stage(mixture_stage, corpus, docstring_corpus),
        }
    generated = None
    if isinstance(corpus, GeneratedCorpus):
        generated = run.stage(generate_stage, run.lease, corpus, label=corpus.model)
    return {corpus.kind: run.stage(corpus_stage, corpus, generated)}


def mine(run: PipelineRun, sources: Sources) -> list[CellResult]:
    """Tokenize and count once per backbone, make rules once per cell."""
    results = []
    for cell in run.recipe.cells:
        tokenized = run.stage(
            tokenize_stage,
            run.lease,
            sources.corpus,
            run.recipe.corpus,
            cell.backbone,
            cell.revision,
            label=cell.backbone,
        )
        results.append(CellResult(cell, tokenized, _rules(run, cell, tokenized)))
    return results


def _rules(run: PipelineRun, cell: Cell, tokenized: Artifact) -> Artifact:
    if cell.rules is not None:
        return run.stage(given_rules_stage, cell, label=cell_label(cell))
    if cell.source == "confidence":
        return _confident_spans(run, cell, tokenized)
    return _frequent_ngrams(run, cell, tokenized)


def _frequent_ngrams(run: PipelineRun, cell: Cell, tokenized: Artifact) -> Artifact:
    recipe, model = run.recipe, (cell.backbone, cell.revision)
    sharing = [
        c
        for c in recipe.cells
        if (c.backbone, c.revision, c.source, c.rules) == (*model, cell.source, None)
    ]
    counted = run.stage(
        count_stage,
        run.lease,
        tokenized,
        cell,
        min(c.tau for c in sharing),
        recipe.segment_length,
        recipe.mining,
        label=cell.backbone,
    )
    return run.stage(
        filter_stage,
        counted,
        tokenized,
        cell,
        recipe.segment_length,
        recipe.mining,
        label=cell_label(cell),
    )


def _confident_spans(run: PipelineRun, cell: Cell, tokenized: Artifact) -> Artifact:
    recipe = run.recipe
    counted = run.stage(
        confidence_stage,
        run.lease,
        tokenized,
        cell,
        recipe.segment_length,
        recipe.mining,
        *recipe.placement,
        label=f"{cell.backbone} p > {cell.min_probability:g}",
    )
    return run.stage(
        confidence_rules_stage,
        counted,
        cell,
        recipe.segment_length,
        recipe.mining,
        label=cell_label(cell),
    )


def distill(run: PipelineRun, results: list[CellResult]) -> None:
    """Distill each cell; whichever ends first, they are registered in the order of the recipe."""
    trained = run.run_parallel([partial(_distilled, run, result) for result in results])
    for result, artifact in zip(results, trained, strict=True):
        result.distilled = result.settings[WT] = artifact
        run.register(result.cell.backbone, artifact)


def _distilled(run: PipelineRun, result: CellResult) -> Artifact:
    return run.stage(
        distill_stage,
        run.lease,
        run.recipe,
        result.cell,
        result.tokenized,
        result.filtered,
        label=cell_label(result.cell),
        setting=WT,
    )


def adaptations(run: PipelineRun, sources: Sources, results: list[CellResult]) -> list[Part]:
    """Return a part for each cell that asks for adaptation."""
    config, task = run.recipe.adapt, next(iter(sources.tasks.values()), None)
    if config is None or task is None:
        return []
    return [partial(_adapted, run, config, task, result) for result in results if result.cell.adapt]


def _adapted(run: PipelineRun, config: AdaptConfig, task: Artifact, result: CellResult) -> None:
    if result.distilled is None:
        return
    cell, label = result.cell, cell_label(result.cell)
    rules = run.stage(task_rules_stage, task, cell, config.rules, config.max_tokens, label=label)
    artifacts = {WT: result.distilled}
    for step in adaptation_steps(config.settings):
        start = rules if step.start is None else artifacts[step.start]
        stage_inputs = (run.lease, run.recipe, config, cell, task, start)
        artifacts[step.name] = (
            run.stage(with_rules_stage, start, rules, label=label, setting=step.name)
            if step.training == "none"
            else run.stage(TRAININGS[step.training], *stage_inputs, label=label, setting=step.name)
        )
    result.settings |= {name: artifacts[name] for name in artifacts if name in config.settings}


def evaluate(run: PipelineRun, sources: Sources, results: list[CellResult]) -> None:
    """Alignment and perplexity per setting; task accuracy of base and every setting."""
    parts: list[Part] = []
    for result in results:
        parts += [partial(_evaluated, run, sources, result, of) for of in result.settings]
        if result.distilled is not None:
            parts.append(partial(_compared, run, sources, result, result.distilled))
    # The driver only waits for workers, so there may be a setting for each of them.
    run.run_parallel(parts, max(run.recipe.cluster.parallel_stages, run.recipe.cluster.workers))
    for result in results:  # whichever was measured first, rows stand in the order of settings
        evaluations, scores = result.evaluations, result.scores
        result.evaluations = {
            name: evaluations[name] for name in result.settings if name in evaluations
        }
        places = [(task, of) for of in (*result.settings, BASE) for task in sources.tasks]
        result.scores = {place: scores[place] for place in places if place in scores}


def _evaluated(run: PipelineRun, sources: Sources, result: CellResult, setting: str) -> None:
    checkpoint = result.settings[setting].path / "checkpoint"
    label = f"{cell_label(result.cell)} {setting}"
    measured = (run.recipe.evaluate, run.recipe.segment_length, *run.recipe.placement)
    if measures(setting, "alignment"):
        result.evaluations[setting] = run.stage(
            evaluate_stage, run.lease, result.tokenized, checkpoint, *measured, label=label
        )
    result.scores |= score(run, sources.tasks, setting, checkpoint, label)


def _compared(run: PipelineRun, sources: Sources, result: CellResult, distilled: Artifact) -> None:
    label, start = f"{result.cell.backbone} {BASE}", distilled.path / "checkpoint"
    result.scores |= score(run, sources.tasks, BASE, start, label)


def benchmark(run: PipelineRun, results: list[CellResult]) -> None:
    """Throughput of each cell's checkpoint under the setting that is timed."""
    if run.recipe.benchmark is None:
        return
    for result in results:
        for setting, artifact in result.settings.items():
            if measures(setting, "speed"):
                result.benchmark = run.stage(
                    benchmark_stage,
                    run.lease,
                    result.tokenized,
                    artifact.path / "checkpoint",
                    run.recipe.benchmark,
                    *run.recipe.placement,
                    label=cell_label(result.cell),
                )
