"""Scores of questions: those of lm-eval's tasks, in shards, and those of ours, without lm-eval.

lm-eval asks questions of any kind (``score_range``); questions of ours with choices, and models
that no checkpoint holds, do without it (``score_choices``). Both score by ``scoring`` and give
``QuestionScores``: values per question, so that shards of any split add up to the same means.
Four accuracies stand side by side and are never relabelled: ``acc`` (sum of log-probabilities) and
``acc_norm`` (per character) are lm-eval's own; ``acc_seq`` is the paper's, the mean log-probability
per token of prompt and answer (``SequenceTask``); ``acc_tok`` is ours, the mean per answer token,
which is also what the preference loss trains.

Neither torch nor lm-eval is loaded before a function needs it: pages import the records, too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from umim_core.errors import ConfigError, EvaluationError, require
from umim_core.evaluation.sizes import Sizes
from umim_core.evaluation.standard_errors import mean_error
from umim_core.store.artifacts import json_digest

if TYPE_CHECKING:
    from lm_eval.api.task import Task

    from umim_core.config.form import Merge
    from umim_core.evaluation.harness import UmimLM
    from umim_core.merging.merged_model import MergedModel
    from umim_core.task_sets.spec import Question, QuestionForm

AnswerLimits = dict[str, int | list[int] | None]
_AT_ONCE: Final = 4  # questions of a forward


def of_ruler(task: str) -> bool:
    """Return whether a task is one of lm-eval's ``ruler``, whose prompts a tokenizer measures."""
    return task.startswith(("niah_", "ruler_"))


@dataclass(frozen=True)
class QuestionSource:
    """A task of ``task_sets``, of a YAML file of ours, or of lm-eval."""

    task: str
    hub: str | None = None  # folder that stands for the hub; None asks the hub, or its cache
    folder: str | None = None  # of the questions of a task of ``task_sets``; None: its own source
    digest: str = ""  # of the folder that is named; what is kept of its content is kept by it
    checkpoint: str | None = None  # the tokens of its backbone measure prompts
    backbone: str | None = None  # where it lies, if it has no name
    options: tuple[tuple[str, int], ...] = ()  # of a generated task (``TaskOptions``)
    new_tokens: int | None = None  # most of an answer; None for the task's own
    answers: int | None = None  # most of a question; None for the task's own
    seed: int = 0
    confirm_run_unsafe_code: bool = False


@dataclass(frozen=True)
class QuestionSet:
    """A task's questions as they were found, with their SHA-256, and its metrics that are means.

    A task that is ``not_run``, for that reason, has none. Of a task whose answers are generated,
    limits are most tokens of an answer and answers per question; where the package makes the
    questions, trained context of the backbone, and fewest and most tokens of a prompt.
    """

    count: int
    digest: str
    metrics: tuple[str, ...]
    not_run: str | None = None
    limits: AnswerLimits = field(default_factory=dict)


@dataclass(frozen=True)
class QuestionScores:
    values: dict[str, list[float]]  # by metric, per question
    prompts: list[str] = field(default_factory=list)  # lm-eval's hash of that of each question
    total: Sizes = field(default_factory=Sizes)  # zeros where nothing was matched
    # Of each question: generated texts, sizes of prompts and answers; none of likelihoods.
    answers: list[list[str]] = field(default_factory=list)
    sizes: list[Sizes] = field(default_factory=list)
    baseline: bool = False  # whether one shortened the contexts

    def figures(self) -> dict[str, float]:
        """Return means, standard errors (``_stderr``) and token reduction as flat figures."""
        means = {name: mean_of(values) for name, values in self.values.items()}
        errors = {f"{name}_stderr": mean["stderr"] for name, mean in means.items()}
        return {
            **{name: float(mean["mean"] or 0.0) for name, mean in means.items()},
            **{name: error for name, error in errors.items() if error is not None},
            "questions": float(max(map(len, self.values.values()), default=0)),
            "token_reduction": self.total.token_reduction,
        }


def mean_of(values: Sequence[float]) -> dict[str, float | None]:
    """Return the mean and its standard error (``stderr``; None for a single value)."""
    return {"mean": float(np.mean(values)), "stderr": mean_error(values)}


def question_set(source: QuestionSource) -> QuestionSet:
    from umim_core.evaluation.tasks.lm_eval_tasks import own_config, runs_programs
    from umim_core.task_sets.spec import TASKS

    name = source.task
    ours = name in TASKS.names() or own_config(name) is not None
    rule = "programs of a model run confined in a table, which lm-eval's own tasks do not do"
    remedy = "Name umim_humaneval, or run lm-eval's own command where programs can do no harm."
    require(ours or not runs_programs(name), ConfigError, rule, name, remedy)
    task, digest = _loaded(source)
    confirmed = source.confirm_run_unsafe_code or not task.get_config("unsafe_code")
    rule = f"a table that runs programs of a model ({name}) needs a confirmation"
    remedy = "Add --confirm-run-unsafe-code; each program runs confined, in a process of its own."
    require(confirmed, ConfigError, rule, "none", remedy)
    limits = {"new_tokens": source.new_tokens, "answers": source.answers}
    given = {limit: value for limit, value in limits.items() if value is not None}
    rule = "new_tokens and answers are for tasks whose answers are generated"
    value, remedy = f"{given} with {name}", "Leave them out, or name such a task."
    require(not given or _generates(task), ConfigError, rule, value, remedy)
    return described(task, digest)


def described(task: Task, digest: str) -> QuestionSet:
    from lm_eval.api.metrics import mean

    facts, limits = task.get_config("metadata") or {}, AnswerLimits()
    if _generates(task):
        limits = {
            "new_tokens": task.get_config("generation_kwargs").get("max_gen_toks"),
            "answers": task.get_config("repeats"),
            **{name: facts[name] for name in ("context", "prompt_tokens") if name in facts},
        }
    if (reason := facts.get("not_run")) is not None:
        return QuestionSet(0, digest, (), reason, limits)
    aggregations = sorted(task.aggregation().items())
    means = tuple(name for name, aggregate in aggregations if aggregate is mean)
    rule = "a metric must be a mean over questions, to be scored in shards"
    value = f"{task.task_name}: {', '.join(name for name, _ in aggregations)}"
    require(bool(means), EvaluationError, rule, value, "Name another task.")
    return QuestionSet(len(task.eval_docs), digest, means, None, limits)


def _generates(task: Task) -> bool:
    return bool(task.OUTPUT_TYPE == "generate_until")


@lru_cache(maxsize=16)  # RULER has 13 tasks, and a table asks each under every setting
def _loaded(source: QuestionSource) -> tuple[Task, str]:
    """Return a task with its data, and the digest of its questions; lm-eval's index takes long."""
    from umim_core.evaluation.tasks.lm_eval_tasks import (
        load_ruler,
        load_tasks,
        standing_for_the_hub,
        task_tokenizer,
    )

    places = {"checkpoint": source.checkpoint, "backbone": source.backbone}
    with standing_for_the_hub(source.hub, source.digest):
        if of_ruler(source.task):
            task = load_ruler(source.task, task_tokenizer(places), source.seed)
        else:
            options: dict[str, object] = {}
            if source.folder is not None:
                options = {"task_data": source.folder}
            elif source.options:
                options = {**places, **dict(source.options)}
            task = load_tasks([source.task], options)[source.task]
    if _generates(task):  # limits of the source lower those of the task
        kwargs, repeats = task.get_config("generation_kwargs"), task.get_config("repeats")
        if (most := source.new_tokens) is not None:
            longest = min(most, kwargs.get("max_gen_toks") or most)
            task.set_config("generation_kwargs", kwargs | {"max_gen_toks": longest})
        if source.answers is not None and repeats:
            task.set_config("repeats", min(repeats, source.answers))
    documents = [task.eval_docs[index] for index in range(len(task.eval_docs))]
    return task, json_digest(documents)


def score_questions(
    model: UmimLM, source: QuestionSource, questions: QuestionSet, first: int, last: int
) -> QuestionScores:
    task, digest = _loaded(source)
    rule = f"every machine must have the same questions of {source.task}"
    value = f"{digest[:12]} instead of {questions.digest[:12]}"
    require(digest == questions.digest, EvaluationError, rule, value, "Give all the same data.")
    return score_range(
        model,
        task,
        range(first, last),
        seed=source.seed if _generates(task) else 0,
        confirm_run_unsafe_code=source.confirm_run_unsafe_code,
    )


def score_range(
    model: UmimLM,
    task: Task,
    questions: range,
    *,
    seed: int = 0,
    confirm_run_unsafe_code: bool = False,
) -> QuestionScores:
    """Score some questions of a loaded task.

    Values are those of the metrics that are means over questions; of a task that filters its
    answers in several ways under ``METRIC,FILTER``, as lm-eval names them.
    """
    import torch
    from lm_eval.api.metrics import mean
    from lm_eval.defaults import DEFAULT_OTHER_SEED

    from umim_core.backbone.devices import forked_generators
    from umim_core.evaluation.tasks.lm_eval_tasks import SequenceTask, run_task

    if isinstance(task, SequenceTask):
        task.tokenizer = model.backbone.tokenizer
    task.set_fewshot_seed(DEFAULT_OTHER_SEED + questions.start)
    model.forget_sizes()
    with forked_generators(model.device):  # seeds of sampled answers are drawn from the global one
        torch.manual_seed(shard_seed(seed, questions.start))
        _, samples = run_task(
            model, task, questions, confirm_run_unsafe_code=confirm_run_unsafe_code
        )
    by_filter: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(samples, key=lambda row: int(row["doc_id"])):
        by_filter.setdefault(row["filter"], []).append(row)
    values = {
        metric if len(by_filter) == 1 else f"{metric},{each}": [float(row[metric]) for row in rows]
        for each, rows in by_filter.items()
        for metric in rows[0]["metrics"]
        if task.aggregation().get(metric, mean) is mean and isinstance(rows[0][metric], int | float)
    }
    rows = next(iter(by_filter.values()))
    known = model.question_sizes(task.task_name)
    sizes = [known.get(number, Sizes()) for number in range(len(rows))]
    kept = rows if _generates(task) else []
    return QuestionScores(
        values,
        [row["prompt_hash"] for row in rows],
        sum(sizes, Sizes()),
        # str(): without the reductions that a generated text carries
        [[str(text) for texts in row["resps"] for text in texts] for row in kept],
        sizes if kept else [],
        model.method is not None,
    )


def shard_seed(seed: int, first: int) -> int:
    """Return the seed of a shard's sampled answers; no sum, so that seeds share no shard's."""
    return int(np.random.SeedSequence((seed, first)).generate_state(1)[0])


def choice_values(
    log_probs: Sequence[Sequence[float]],
    tokens: Sequence[Sequence[int]],
    characters: Sequence[Sequence[int]],
    golds: Sequence[int],
) -> dict[str, list[float]]:
    """Return the accuracies of questions, and their margins, one value a question.

    They follow from the log-probabilities of each answer (nats), its tokens and its characters. Of
    equal answers the first counts. ``margin`` is by how much the right answer leads the best wrong
    one, per token.
    """
    values: dict[str, list[float]] = {"acc": [], "acc_norm": [], "acc_tok": [], "margin": []}
    for sums, *sizes, gold in zip(log_probs, characters, tokens, golds, strict=True):
        by_character, by_token = ([x / n for x, n in zip(sums, of, strict=True)] for of in sizes)
        ways = {"acc": sums, "acc_norm": by_character, "acc_tok": by_token}
        for metric, scores in ways.items():
            values[metric].append(float(scores.index(max(scores)) == gold))
        values["margin"].append(by_token[gold] - max(by_token[:gold] + by_token[gold + 1 :]))
    return values


def score_choices(
    questions: Sequence[Question],
    form: QuestionForm,
    merged_model: MergedModel,
    batch_size: int,
    merge: Merge = "prompt",
    max_tokens: int = sys.maxsize,
) -> QuestionScores:
    """Score questions of ours, which need no lm-eval, by any model; see ``choice_values``.

    Prompts lose leading tokens until they fit ``max_tokens`` with the longest answer. Every context
    that is matched alone counts once.
    """
    from umim_core.adaptation.choices import encode_questions
    from umim_core.evaluation.scoring import Request, Scorer

    require(bool(questions), EvaluationError, "a task must have questions", "none", "Give some.")
    encoded = encode_questions(questions, merged_model.backbone.encode, form, max_tokens)
    requests = [Request(each.context, answer) for each in encoded for answer in each.endings]
    longest = max(len(request.context) + len(request.continuation) for request in requests)
    longest = min(longest, merged_model.backbone.max_positions or longest)
    answers = max(len(question.choices) for question in questions)
    scored = iter(Scorer(merged_model, longest, merge).score(requests, batch_size * answers))
    rows = [[next(scored) for _ in question.choices] for question in questions]
    sizes = [row[0].sizes for row in rows]  # the answers of a question share their context
    further = [score.sizes for row in rows for score in row[1:]]
    sizes += [Sizes(s.tokens - s.context_tokens, s.units - s.context_units) for s in further]
    values = choice_values(
        [[score.log_prob for score in row] for row in rows],
        [[len(ending) for ending in each.endings] for each in encoded],
        [[len(choice) for choice in question.choices] for question in questions],
        [question.gold for question in questions],
    )
    return QuestionScores(values, total=sum(sizes, Sizes()))


def evaluate_task(
    checkpoint: str | Path,
    questions: Path,
    form: QuestionForm,
    *,
    merge: Merge = "prompt",
    limit: int | None = None,
    dtype: str = "float32",
    device: str | None = None,
) -> dict[str, float]:
    """Return accuracies and token reductions of the first questions of a file, by name."""
    from umim_core.model.umim import UMIM
    from umim_core.task_sets.spec import read_questions

    model = UMIM.from_pretrained(checkpoint, dtype=dtype, device=device).merged_model.reading(merge)
    kind: Merge = "all" if merge == "all" else "prompt"
    scores = score_choices(read_questions(questions)[:limit], form, model, _AT_ONCE, kind)
    del scores.values["margin"]  # a figure of adaptation curves
    alone = scores.total.context_token_reduction
    return scores.figures() | ({} if alone is None else {"context_token_reduction": alone})
