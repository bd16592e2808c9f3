"""A task's questions in shards: each scored on its own, values kept by question.

What is kept of a shard are values that the task's metrics average, so shards of any split of the
questions add up to the same means. Metrics with another aggregation are left out. Examples in
prompts and sampled answers, where a task draws them, are those of the shard, whoever scores it. Of
generated answers the texts and sizes are kept, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from lm_eval import evaluator
from lm_eval.api.metrics import mean
from lm_eval.api.task import Task
from lm_eval.defaults import DEFAULT_OTHER_SEED

from umim_core.backbone.devices import forked_generators
from umim_core.errors import ConfigError, EvaluationError
from umim_core.evaluation.harness import UmimLM
from umim_core.evaluation.scoring import Sizes, counted_sizes
from umim_core.evaluation.tasks.paper_task import SequenceTask
from umim_core.evaluation.tasks.question_records import (
    Limits,
    QuestionSet,
    QuestionSource,
    ShardScores,
)
from umim_core.evaluation.tasks.task_runs import (
    load_tasks,
    own_config,
    runs_programs,
    standing_for_the_hub,
)
from umim_core.store.artifacts import canonical_json, sha256_bytes
from umim_core.task_sets.spec import TASKS


def question_set(source: QuestionSource) -> QuestionSet:
    """Load a task's questions and return what they are."""
    name = source.task
    if name not in TASKS.names() and own_config(name) is None and runs_programs(name):
        raise ConfigError(
            "programs of a model run confined in a table, which lm-eval's own tasks do not do",
            name,
            "Name umim_humaneval, or run lm-eval's own command where programs can do no harm.",
        )
    task, digest = _loaded(source)
    if task.get_config("unsafe_code") and not source.confirm_run_unsafe_code:
        raise ConfigError(
            f"a table that runs programs of a model ({name}) needs a confirmation",
            "none",
            "Add --confirm-run-unsafe-code; each program runs confined, in a process of its own.",
        )
    limits = {"new_tokens": source.new_tokens, "answers": source.answers}
    if not _generates(task) and (said := {k: v for k, v in limits.items() if v is not None}):
        raise ConfigError(
            "new_tokens and answers are for tasks whose answers are generated",
            f"{said} with {name}",
            "Leave them out, or name such a task.",
        )
    return described(task, digest)


def described(task: Task, digest: str) -> QuestionSet:
    """Return what the questions of a loaded task are, of which a SHA-256 is given."""
    if not _generates(task):
        return QuestionSet(len(task.eval_docs), digest, _means(task))
    facts = task.get_config("metadata") or {}
    limits: Limits = {
        "new_tokens": task.get_config("generation_kwargs").get("max_gen_toks"),
        "answers": task.get_config("repeats"),
        **{name: facts[name] for name in ("context", "prompt_tokens") if name in facts},
    }
    if facts.get("not_run") is not None:
        return QuestionSet(0, digest, (), facts["not_run"], limits)
    return QuestionSet(len(task.eval_docs), digest, _means(task), None, limits)


def _generates(task: Task) -> bool:
    return bool(task.OUTPUT_TYPE == "generate_until")


def score_questions(
    model: UmimLM, source: QuestionSource, questions: QuestionSet, first: int, last: int
) -> ShardScores:
    """Score the questions ``first`` to ``last`` - 1."""
    task, digest = _loaded(source)
    if digest != questions.digest:
        raise EvaluationError(
            f"every machine must have the same questions of {source.task}",
            f"{digest[:12]} instead of {questions.digest[:12]}",
            "Give all machines the same data.",
        )
    if isinstance(task, SequenceTask):
        task.tokenizer = model.backbone.tokenizer
    return score_range(
        model,
        task,
        first,
        last,
        seed=source.seed if _generates(task) else 0,
        confirm_run_unsafe_code=source.confirm_run_unsafe_code,
    )


def score_range(
    model: UmimLM,
    task: Task,
    first: int,
    last: int,
    *,
    seed: int = 0,
    confirm_run_unsafe_code: bool = False,
) -> ShardScores:
    """Score the questions ``first`` to ``last`` - 1 of a loaded task.

    Values are those of the metrics that are means over questions; of a task that filters its
    answers in several ways under ``METRIC,FILTER``, as lm-eval names them.
    """
    name = task.task_name
    task.set_fewshot_seed(DEFAULT_OTHER_SEED + first)
    with forked_generators(model.device):  # the base model draws from the global generator
        torch.manual_seed(shard_seed(seed, first))
        results = evaluator.evaluate(  # by this name: it is the one that counts sizes
            lm=model,
            task_dict={"tasks": {name: task}, "groups": {}, "group_map": {}},
            samples={name: list(range(first, last))},
            bootstrap_iters=0,
            confirm_run_unsafe_code=confirm_run_unsafe_code,
        )
    samples: list[dict[str, Any]] = sorted(results["samples"][name], key=lambda row: row["doc_id"])
    filters = dict.fromkeys(row["filter"] for row in samples)
    by_filter = {each: [row for row in samples if row["filter"] == each] for each in filters}
    values = {
        metric if len(filters) == 1 else f"{metric},{each}": [float(row[metric]) for row in rows]
        for each, rows in by_filter.items()
        for metric in rows[0]["metrics"]
        if task.aggregation().get(metric, mean) is mean and isinstance(rows[0][metric], int | float)
    }
    rows = next(iter(by_filter.values()))
    sizes = [sum(_sizes(row), Sizes()) for row in rows]
    total, generated = sum(sizes, Sizes()), _generates(task)
    return ShardScores(
        values,
        (total.tokens, total.units),
        (total.context_tokens, total.context_units),
        [row["prompt_hash"] for row in rows],
        # str(): without the reductions that a generated text carries
        [[str(text) for texts in row["resps"] for text in texts] for row in rows]
        if generated
        else [],
        [[size.tokens, size.units, size.context_tokens, size.context_units] for size in sizes]
        if generated
        else [],
        (0, 0) if total.columns is None else (total.context_tokens, total.columns),
        None if model.method is None else total.shortfall,
    )


def shard_seed(seed: int, first: int) -> int:
    """Return the seed of a shard's sampled answers; no sum, so that seeds share no shard's."""
    return int(np.random.SeedSequence((seed, first)).generate_state(1)[0])


def _sizes(row: Mapping[str, Any]) -> list[Sizes]:
    """Return the sizes of a question's requests that its token reduction counts."""
    names = [field.name for field in fields(Sizes)]
    asked = zip(row["arguments"], row.get("umim", ()), strict=False)
    return counted_sizes(
        [
            (arguments[0], size and Sizes(**{name: size[name] for name in names}))
            for arguments, size in asked
        ]
    )


def _means(task: Task) -> tuple[str, ...]:
    """Return the metrics that lm-eval averages over questions."""
    names = tuple(
        name for name, aggregate in sorted(task.aggregation().items()) if aggregate is mean
    )
    if not names:
        raise EvaluationError(
            "a metric must be a mean over questions, to be scored in shards",
            f"{task.task_name}: {', '.join(sorted(task.aggregation()))}",
            "Name another task.",
        )
    return names


@lru_cache(maxsize=8)
def _loaded(source: QuestionSource) -> tuple[Task, str]:
    """Return a task with its data, and the digest of its questions; lm-eval's index takes long."""
    options: dict[str, object] = {}
    if source.folder is not None:
        options = {"task_data": source.folder}
    elif source.options:
        places = {"checkpoint": source.checkpoint, "backbone": source.backbone}
        options = {**places, **dict(source.options)}
    with standing_for_the_hub(source.hub, source.digest):
        task = load_tasks([source.task], options)[source.task]
    if _generates(task):
        _limit(task, source)
    documents = [task.eval_docs[index] for index in range(len(task.eval_docs))]
    return task, sha256_bytes(canonical_json(documents).encode())


def _limit(task: Task, source: QuestionSource) -> None:
    """Lower the most tokens of an answer, and the answers per question, to those of a source."""
    kwargs = task.get_config("generation_kwargs")
    own, wanted = kwargs.get("max_gen_toks"), source.new_tokens
    if wanted is not None:
        longest = wanted if own is None else min(own, wanted)
        task.set_config("generation_kwargs", kwargs | {"max_gen_toks": longest})
    if source.answers is not None and task.get_config("repeats"):
        task.set_config("repeats", min(task.get_config("repeats"), source.answers))
