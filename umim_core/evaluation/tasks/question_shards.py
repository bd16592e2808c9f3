"""A task's questions in shards: each scored on its own, values kept by question.

What is kept of a shard are values that the task's metrics average, so shards of any split of the
questions add up to the same means. Metrics with another aggregation are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import chdir, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from datasets import config as datasets_config
from lm_eval.api.metrics import mean
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate

from umim_core.errors import ConfigError, EvaluationError, did_you_mean
from umim_core.evaluation.harness import UmimLM
from umim_core.evaluation.tasks.sequence_task import SequenceTask
from umim_core.evaluation.tasks.shard_values import QuestionSet, QuestionSource, ShardScores
from umim_core.evaluation.tasks.spec_task import knows_task, lm_eval_config
from umim_core.evaluation.tasks.task_runs import load_tasks
from umim_core.store.artifacts import canonical_json, sha256_bytes
from umim_core.task_sets.spec import TASKS


def question_set(source: QuestionSource) -> QuestionSet:
    """Load a task's questions and return what they are.

    Raises:
        ConfigError: If there is no task of this name.
        EvaluationError: If none of its metrics is a mean over questions.
    """
    if source.task not in TASKS.names() and not knows_task(source.task):
        raise ConfigError(
            f"a task must be one of {', '.join(TASKS.names())}, or one that lm-eval ships",
            source.task,
            did_you_mean(source.task, TASKS.names()) or "`lm-eval ls tasks` lists lm-eval's.",
        )
    task, digest = _loaded(source)
    return QuestionSet(len(task.eval_docs), digest, _means(task))


def score_questions(
    model: UmimLM, source: QuestionSource, questions: QuestionSet, first: int, last: int
) -> ShardScores:
    """Score the questions ``first`` to ``last`` - 1.

    Args:
        model: A model that has scored nothing yet.
        source: The task.
        questions: What :func:`question_set` found.
        first: Number of the first question.
        last: Number behind the last one.

    Raises:
        EvaluationError: If the questions are others here.
    """
    task, digest = _loaded(source)
    if digest != questions.digest:
        raise EvaluationError(
            f"every machine must have the same questions of {source.task}",
            f"{digest[:12]} instead of {questions.digest[:12]}",
            "Give all machines the same data.",
        )
    if isinstance(task, SequenceTask):
        task.tokenizer = model.backbone.tokenizer
    name = task.task_name
    found = evaluate(
        lm=model,
        task_dict={"tasks": {name: task}, "groups": {}, "group_map": {}},
        samples={name: list(range(first, last))},
        bootstrap_iters=0,
    )
    rows: list[dict[str, Any]] = sorted(found["samples"][name], key=lambda row: row["doc_id"])
    scorer = model.scorer
    tallies = (scorer.inputs, scorer.contexts) if scorer is not None else ()
    counted = [(tally.raw, tally.units) for tally in tallies] or [(0, 0)] * 2
    return ShardScores(
        {metric: [float(row[metric]) for row in rows] for metric in questions.metrics}, *counted
    )


def _means(task: Task) -> tuple[str, ...]:
    """Return the metrics that lm-eval averages over questions."""
    found = tuple(
        name for name, aggregate in sorted(task.aggregation().items()) if aggregate is mean
    )
    if not found:
        raise EvaluationError(
            "a metric must be a mean over questions, to be scored in shards",
            f"{task.task_name}: {', '.join(sorted(task.aggregation()))}",
            "Name another task.",
        )
    return found


@lru_cache(maxsize=8)
def _loaded(source: QuestionSource) -> tuple[Task, str]:
    """Return a task with its data, and the digest of its questions; lm-eval's index takes long."""
    own = source.task in TASKS.names()
    named: str | dict[str, object] = lm_eval_config(TASKS.find(source.task)) if own else source.task
    options = {} if source.folder is None else {"split_folder": source.folder}
    with _standing_for_the_hub(source):
        task = load_tasks([named], options)[source.task]
    documents = [task.eval_docs[index] for index in range(len(task.eval_docs))]
    return task, sha256_bytes(canonical_json(documents).encode())


@contextmanager
def _standing_for_the_hub(source: QuestionSource) -> Iterator[None]:
    if source.hub is None:
        yield
        return
    before = datasets_config.HF_DATASETS_CACHE
    datasets_config.HF_DATASETS_CACHE = Path(before) / f"umim-{source.digest[:16]}"
    try:
        with chdir(source.hub):  # copies are found by paths that equal the hub's names
            yield
    finally:
        datasets_config.HF_DATASETS_CACHE = before
