"""Accuracy of one checkpoint on a multiple-choice task: of ``task_sets``, or of lm-eval's own.

Four accuracies stand side by side and are never relabelled: ``acc`` (sum of log-probabilities) and
``acc_norm`` (per character) are lm-eval's own; ``acc_seq`` is the paper's, the mean log-probability
per token of prompt and answer (``SequenceTask``); ``acc_tok`` is ours, the mean per answer token,
which is also what the preference loss trains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from umim_core.adaptation.choices import encode_pair
from umim_core.backbone.backbone import Backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.recipe import DEFAULT_TASK
from umim_core.errors import EvaluationError, MissingExtraError

if TYPE_CHECKING:
    from umim_core.config.form import Merge


@dataclass(frozen=True)
class TaskResult:
    """Accuracies of one evaluation. Standard errors are those of a mean."""

    task: str
    merge: str
    backbone: str
    questions: int
    acc: float
    acc_stderr: float
    acc_norm: float
    acc_norm_stderr: float
    acc_tok: float
    acc_tok_stderr: float
    token_reduction: float
    context_token_reduction: float
    acc_seq: float = math.nan
    acc_seq_stderr: float = math.nan

    def metrics(self) -> dict[str, float]:
        """Return the numbers by name, those that are NaN left out."""
        numbers = {k: float(v) for k, v in asdict(self).items() if isinstance(v, int | float)}
        return {name: value for name, value in numbers.items() if not math.isnan(value)}


def evaluate_task(
    checkpoint: str | Path | Checkpoint | None = None,
    *,
    merge: Merge = "prompt",
    backbone: str | Backbone | None = None,
    task: str = DEFAULT_TASK,
    data: Path | None = None,
    limit: int | None = None,
    batch_size: int = 16,
    dtype: str = "float32",
    device: str | None = None,
) -> TaskResult:
    """Run one multiple-choice task of this package or of lm-eval through lm-eval.

    Arguments are those of ``UmimLM``. ``data`` is a folder with a file per split (by default see
    ``evaluation.tasks.spec_task``), ``limit`` the first questions of the test split, None for all.
    """
    try:
        from umim_core.evaluation.harness import UmimLM
        from umim_core.evaluation.tasks.paper_task import SequenceTask
        from umim_core.evaluation.tasks.task_runs import load_tasks, run_task
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "lm_eval":
            raise
        raise MissingExtraError(
            "task evaluation needs lm-eval", error.name, "pip install 'umim[eval]'"
        ) from error
    loaded = load_tasks([task], {} if data is None else {"task_data": str(data)})
    model = UmimLM(
        checkpoint,
        merge,
        backbone,
        dtype=dtype,
        device=device,
        batch_size=batch_size,
        raw_tail=0,
    ).sharing_contexts()
    for each in loaded.values():
        if isinstance(each, SequenceTask):
            each.tokenizer = model.backbone.tokenizer
    metrics, samples = run_task(model, loaded[task], limit) if task in loaded else ({}, [])
    if "acc,none" not in metrics:
        raise EvaluationError(
            "the task must be multiple choice", task, "Name one that reports acc."
        )
    hits = [_hit_per_token(sample, model.tok_encode) for sample in samples]
    acc_tok = sum(hits) / len(hits)
    unmatched = 0.0 if model.merge == "none" else math.nan
    acc_seq = float(metrics.get("acc_seq,none", math.nan))
    return TaskResult(
        task=task,
        merge=model.merge,
        backbone=model.backbone.name,
        questions=len(hits),
        acc=float(metrics["acc,none"]),
        acc_stderr=_stderr(float(metrics["acc,none"]), len(hits)),
        acc_norm=float(metrics.get("acc_norm,none", math.nan)),
        acc_norm_stderr=_stderr(float(metrics.get("acc_norm,none", math.nan)), len(hits)),
        acc_tok=acc_tok,
        acc_tok_stderr=_stderr(acc_tok, len(hits)),
        token_reduction=float(metrics.get("token_reduction,none", 0.0)),
        context_token_reduction=float(metrics.get("context_token_reduction,none", unmatched)),
        acc_seq=acc_seq,
        acc_seq_stderr=_stderr(acc_seq, len(hits)),
    )


def _stderr(accuracy: float, questions: int) -> float:
    """Return the standard error of a mean of 0s and 1s, as lm-eval computes it (ddof 1)."""
    return math.sqrt(accuracy * (1 - accuracy) / (questions - 1)) if questions > 1 else math.nan


def _hit_per_token(sample: Mapping[str, Any], encode: Callable[[str], list[int]]) -> bool:
    """Return whether the gold answer has the highest mean token log-probability."""
    asked = list(zip(sample["arguments"], sample["filtered_resps"], strict=True))
    answers = [each for each in asked if each[0][0]] or asked  # not a text without its context
    pairs: Sequence[tuple[str, str]] = [(args[0], args[1]) for args, _ in answers]
    lengths = [len(encode_pair(encode, *pair)[1]) for pair in pairs]
    totals = [float(response[0]) for _, response in answers]
    means = [total / length for total, length in zip(totals, lengths, strict=True)]
    return means.index(max(means)) == _gold(sample["target"], [answer for _, answer in pairs])


def _gold(target: object, answers: Sequence[str]) -> int:
    """Return the gold index; lm-eval logs an index, its digits, or the answer's text."""
    stripped = [answer.strip() for answer in answers]
    if isinstance(target, int):
        return target
    if isinstance(target, str):
        if target.strip() in stripped:
            return stripped.index(target.strip())
        if target.isdigit():
            return int(target)
    raise EvaluationError(
        "the task must have one gold answer per question", target, "acc_tok is not defined for it."
    )
