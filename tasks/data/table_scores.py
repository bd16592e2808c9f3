"""Scores of a table: shards put together, means, and differences paired by question."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from umim_core.errors import EvaluationError
from umim_core.evaluation.tasks.question_shards import QuestionSet, ShardScores

QUESTIONS: Final = "questions.json"
SHARDS: Final = "shards"
Report = dict[str, Any]
_PARTS: Final = ("prompts", "answers", "sizes")  # lists over questions
_NONE: Final = (0, 0)


def read_questions(directory: Path) -> QuestionSet:
    """Return the questions that an artifact of stage ``questions`` describes."""
    body = read_report(directory / QUESTIONS)
    return QuestionSet(**body | {"metrics": tuple(body["metrics"])})


def read_shards(directory: Path) -> ShardScores:
    """Return the shards of an artifact put together, in the order of the questions."""
    shards = [read_report(path) for path in sorted((directory / SHARDS).glob("*.json"))]
    joined = {part: [entry for shard in shards for entry in shard.get(part, ())] for part in _PARTS}
    inputs, contexts, columns = (
        tuple(sum(shard.get(name, _NONE)[side] for shard in shards) for side in (0, 1))
        for name in ("inputs", "contexts", "columns")
    )
    values = {
        metric: [value for shard in shards for value in shard["values"][metric]]
        for metric in (shards[0]["values"] if shards else ())
    }
    over = [shard.get("shortfall") for shard in shards]
    shortfall = None if None in over else sum(over)
    return ShardScores(values, inputs, contexts, columns=columns, shortfall=shortfall, **joined)


def table_row(task: str, setting: str, own: ShardScores, base: ShardScores) -> Report:
    """Return the figures of a task under a setting, with differences to the first setting.

    Returns:
        Mean and standard error (``stderr``) of every metric, and of its difference where the first
        setting has it: token reductions of generated answers are of merging alone. ``shortfall`` is
        the part of contexts that a baseline should have dropped and could not.

    Raises:
        EvaluationError: If the prompts of the two differ.
    """
    if own.prompts != base.prompts:
        raise EvaluationError(
            f"all settings must answer the same questions of {task}, behind the same prompts",
            f"other prompts under {setting}",
            "Use a task whose prompts do not change from one reading to the next.",
        )
    return {
        "task": task,
        "setting": setting,
        "questions": len(own.prompts),
        "token_reduction": reduction(own.inputs),
        "context_token_reduction": reduction(own.contexts),
        "cache_reduction": reduction(own.columns),
        "shortfall": missing(own),
        **{name: mean_of(values) for name, values in own.values.items()},
        **{
            f"{name}_difference": mean_of(np.subtract(values, base.values[name]).tolist())
            for name, values in own.values.items()
            if name in base.values
        },
    }


def totals(scores: ShardScores) -> dict[str, float]:
    """Return means, standard errors and token reduction as flat figures."""
    means = {name: mean_of(values) for name, values in scores.values.items()}
    errors = {f"{name}_stderr": mean["stderr"] for name, mean in means.items()}
    return {
        **{name: float(mean["mean"] or 0.0) for name, mean in means.items()},
        **{name: error for name, error in errors.items() if error is not None},
        "questions": float(len(scores.prompts)),
        "token_reduction": reduction(scores.inputs) or 0.0,
    }


def mean_of(values: Sequence[float]) -> dict[str, float | None]:
    """Return the mean and its standard error (``stderr``; None for a single value)."""
    many = len(values) > 1
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if many else None
    return {"mean": float(np.mean(values)), "stderr": error}


def reduction(tally: Sequence[int]) -> float | None:
    """Return (raw tokens - units) / raw tokens of such a pair; None where nothing was matched."""
    raw, units = tally
    return (raw - units) / raw if raw else None


def missing(scores: ShardScores) -> float | None:
    """Return units over the budget / raw tokens of contexts; None without a baseline or context."""
    raw, _ = scores.contexts
    return None if scores.shortfall is None or not raw else scores.shortfall / raw


def read_report(path: Path) -> Report:
    """Read a JSON object."""
    report: Report = json.loads(path.read_text(encoding="utf-8"))
    return report
