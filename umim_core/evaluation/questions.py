"""The one scorer of questions: of shards of any task, of whole tasks, of answers given as ids.

What is kept of a shard are values that the task's metrics average, so shards of any split of the
questions add up to the same means. Examples in prompts and sampled answers, where a task draws
them, are those of the shard, whoever scores it.

Four accuracies stand side by side and are never relabelled: ``acc`` (sum of log-probabilities) and
``acc_norm`` (per character) are lm-eval's own; ``acc_seq`` is the paper's, the mean log-probability
per token of prompt and answer (``SequenceTask``); ``acc_tok`` is ours, the mean per answer token,
which is also what the preference loss trains.

Workers and pages import the records here, so neither torch nor lm-eval is loaded before a function
needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from umim_core.config.recipe import DEFAULT_TASK
from umim_core.errors import ConfigError, EvaluationError, MissingExtraError, require
from umim_core.evaluation.paired_differences import mean_error
from umim_core.evaluation.sizes import Sizes
from umim_core.store.artifacts import canonical_json, sha256_bytes

if TYPE_CHECKING:
    from lm_eval.api.task import Task

    from umim_core.adaptation.choices import EncodedQuestion
    from umim_core.checkpoint.checkpoint import Checkpoint
    from umim_core.config.form import Merge
    from umim_core.evaluation.harness import UmimLM
    from umim_core.merging.merged_model import MergedModel

Limits = dict[str, int | list[int] | None]


def of_ruler(task: str) -> bool:
    """Return whether a task is one of lm-eval's ``ruler``, whose prompts a tokenizer measures."""
    return task.startswith(("niah_", "ruler_"))


@dataclass(frozen=True)
class QuestionSource:
    """A task of ``task_sets``, of a YAML file of ours, or of lm-eval.

    Attributes:
        hub: Folder that stands for the hub; None asks the hub, or its cache.
        folder: Folder of the questions of a task of ``task_sets``; None: its own source.
        digest: Of the folder that is named; what is kept of its content is kept by it.
        checkpoint: The tokens of its backbone, which lies at ``backbone`` if it has no name,
            measure prompts.
        options: Of a task that the package generates (``TaskOptions``).
        new_tokens: Most tokens of an answer, and ``answers`` per question; None for the task's own.
    """

    task: str
    hub: str | None = None
    folder: str | None = None
    digest: str = ""
    checkpoint: str | None = None
    backbone: str | None = None
    options: tuple[tuple[str, int], ...] = ()
    new_tokens: int | None = None
    answers: int | None = None
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
    limits: Limits = field(default_factory=dict)


@dataclass(frozen=True)
class ShardScores:
    """Scores of a shard.

    Attributes:
        values: Metric -> a value per question.
        prompts: lm-eval's hash of the prompt of each question.
        total: Sizes of all contexts and answers; zeros where nothing was matched.
        answers: Generated texts of each question; empty for a task of likelihoods.
        sizes: Those of each question's prompts and answers; empty likewise.
        baseline: Whether a baseline shortened the contexts.
    """

    values: dict[str, list[float]]
    prompts: list[str]
    total: Sizes = field(default_factory=Sizes)
    answers: list[list[str]] = field(default_factory=list)
    sizes: list[Sizes] = field(default_factory=list)
    baseline: bool = False

    def figures(self) -> dict[str, float]:
        """Return means, standard errors (``_stderr``) and token reduction as flat figures."""
        means = {name: mean_of(values) for name, values in self.values.items()}
        errors = {f"{name}_stderr": mean["stderr"] for name, mean in means.items()}
        return {
            **{name: float(mean["mean"] or 0.0) for name, mean in means.items()},
            **{name: error for name, error in errors.items() if error is not None},
            "questions": float(len(self.prompts)),
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

    facts, limits = task.get_config("metadata") or {}, Limits()
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
    return task, sha256_bytes(canonical_json(documents).encode())


def score_questions(
    model: UmimLM, source: QuestionSource, questions: QuestionSet, first: int, last: int
) -> ShardScores:
    task, digest = _loaded(source)
    rule = f"every machine must have the same questions of {source.task}"
    value = f"{digest[:12]} instead of {questions.digest[:12]}"
    require(digest == questions.digest, EvaluationError, rule, value, "Give all the same data.")
    scores, _ = score_range(
        model,
        task,
        range(first, last),
        seed=source.seed if _generates(task) else 0,
        confirm_run_unsafe_code=source.confirm_run_unsafe_code,
    )
    return scores


def score_range(
    model: UmimLM,
    task: Task,
    questions: range,
    *,
    seed: int = 0,
    confirm_run_unsafe_code: bool = False,
) -> tuple[ShardScores, list[dict[str, Any]]]:
    """Score some questions of a loaded task; return lm-eval's samples, too.

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
    scores = ShardScores(
        values,
        [row["prompt_hash"] for row in rows],
        sum(sizes, Sizes()),
        # str(): without the reductions that a generated text carries
        [[str(text) for texts in row["resps"] for text in texts] for row in kept],
        sizes if kept else [],
        model.method is not None,
    )
    return scores, rows


def shard_seed(seed: int, first: int) -> int:
    """Return the seed of a shard's sampled answers; no sum, so that seeds share no shard's."""
    return int(np.random.SeedSequence((seed, first)).generate_state(1)[0])


def evaluate_task(
    checkpoint: str | Path | Checkpoint | None = None,
    *,
    merge: Merge = "prompt",
    task: str = DEFAULT_TASK,
    data: Path | None = None,
    limit: int | None = None,
    batch_size: int = 16,
    dtype: str = "float32",
    device: str | None = None,
) -> dict[str, float]:
    """Return accuracies and token reductions of one multiple-choice task, by name.

    Arguments are those of ``UmimLM``. The task is of this package or of lm-eval; ``data`` is a
    folder with a file per split (by default the task's own source), ``limit`` the first questions
    of the test split, None for all.
    """
    try:
        from umim_core.evaluation.harness import UmimLM
        from umim_core.evaluation.tasks.lm_eval_tasks import load_tasks
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "lm_eval":
            raise
        raise MissingExtraError(
            "task evaluation needs lm-eval", error.name, "pip install 'umim[eval]'"
        ) from error
    loaded = load_tasks([task], {} if data is None else {"task_data": str(data)})[task]
    model = UmimLM(
        checkpoint, merge, dtype=dtype, device=device, batch_size=batch_size, raw_tail=0
    ).sharing_contexts()
    questions = range(len(loaded.eval_docs))[:limit]
    scores, samples = score_range(model, loaded, questions)
    scores.values["acc_tok"] = [_hit_per_token(sample, model) for sample in samples]
    alone = 0.0 if model.merge == "none" else scores.total.context_token_reduction
    return scores.figures() | ({} if alone is None else {"context_token_reduction": alone})


def _hit_per_token(sample: Mapping[str, Any], model: UmimLM) -> float:
    """Return 1.0 if the gold answer has the highest mean token log-probability, else 0.0."""
    requests = list(zip(sample["arguments"], sample["filtered_resps"], strict=True))
    answers = [each for each in requests if each[0][0]] or requests  # no text without its context
    means = [
        float(response[0]) / len(model._encode_pair(*arguments[:2])[1])
        for arguments, response in answers
    ]
    gold, texts = sample["target"], [arguments[1].strip() for arguments, _ in answers]
    if isinstance(gold, str):  # lm-eval logs an index, its digits, or the answer's text
        stripped = gold.strip()
        gold = texts.index(stripped) if stripped in texts else int(gold) if gold.isdigit() else None
    if not isinstance(gold, int):
        rule = "the task must have one gold answer per question"
        raise EvaluationError(rule, sample["target"], "acc_tok is not defined for it.")
    return float(means.index(max(means)) == gold)


@dataclass(frozen=True)
class ChoiceScores:
    """Scores of a task's questions, in their order.

    ``scores`` are mean token log-probabilities of every answer, per question (nats); ``total`` has
    every context once, and all answers.
    """

    scores: list[list[float]]
    golds: list[int]
    total: Sizes

    def hits(self) -> list[float]:
        pairs = zip(self.scores, self.golds, strict=True)
        return [float(row.index(max(row)) == gold) for row, gold in pairs]

    def margins(self) -> list[float]:
        """Return by how much the right answer leads the best wrong one, per question (nats)."""
        pairs = zip(self.scores, self.golds, strict=True)
        return [row[gold] - max(row[:gold] + row[gold + 1 :]) for row, gold in pairs]


def score_choices(
    questions: Sequence[EncodedQuestion], merged_model: MergedModel, batch_size: int
) -> ChoiceScores:
    from umim_core.evaluation.scoring import Request, Scorer

    require(bool(questions), EvaluationError, "a task must have questions", "none", "Give some.")
    requests = [Request(each.context, answer) for each in questions for answer in each.endings]
    longest = max(len(request.context) + len(request.continuation) for request in requests)
    answers = max(len(question.endings) for question in questions)
    scored = Scorer(merged_model, longest).score(requests, batch_size * answers)
    likelihoods = iter(zip(requests, scored, strict=True))
    rows = [[next(likelihoods) for _ in question.endings] for question in questions]
    firsts = [row[0][1].sizes for row in rows]  # the answers of a question share their context
    raw, units = (sum(s.context_tokens for s in firsts), sum(s.context_units for s in firsts))
    ends = sum(len(request.continuation) for request in requests)
    return ChoiceScores(
        [[score.log_prob / len(request.continuation) for request, score in row] for row in rows],
        [question.gold for question in questions],
        Sizes(raw + ends, units + ends, raw, units),
    )
