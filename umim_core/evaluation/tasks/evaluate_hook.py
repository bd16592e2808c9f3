"""lm-eval's ``evaluate`` for our models: sizes of requests, and differences to the base model.

    results of a task    acc, token_reduction, context_token_reduction
                         with a base model: acc_base, acc_difference, each with its standard error
    a logged sample      umim: tokens and units of every request
                         with a base model, base: its responses and metrics of the same question

lm-eval 0.4.13 gives a model its requests, never its tasks, and offers no other place for this. The
first model of ours puts a function in the place of ``lm_eval.evaluator.evaluate``; other models
pass through it unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import wraps
from typing import Any, Final, ParamSpec, cast

from lm_eval import evaluator
from lm_eval.api.metrics import mean
from lm_eval.api.model import CachingLM
from lm_eval.api.task import Task

from umim_core.errors import EvaluationError
from umim_core.evaluation.paired_differences import (
    bootstrap_difference_error,
    mean_difference_error,
)
from umim_core.evaluation.scored_requests import Sizes
from umim_core.evaluation.tasks.sized_model import SizedModel

P = ParamSpec("P")
Results = dict[str, Any]
_UNKNOWN: Final = "N/A"  # lm-eval's word for a standard error that there is not
_EXTENDED: Final = "evaluate_of_umim_models"


def extend_evaluate() -> None:
    """Put the extension in the place of lm-eval's function, once a process."""
    if evaluator.evaluate.__name__ != _EXTENDED:
        evaluator.evaluate = _extended(evaluator.evaluate)


def _extended(evaluate: Callable[P, Results | None]) -> Callable[P, Results | None]:
    @wraps(evaluate)
    def evaluate_of_umim_models(*args: P.args, **kwargs: P.kwargs) -> Results | None:
        given = kwargs.get("lm")
        model = given.lm if isinstance(given, CachingLM) else given
        if args or not isinstance(model, SizedModel):
            return evaluate(*args, **kwargs)
        again = cast("Callable[..., Results | None]", evaluate)
        logged = bool(kwargs.get("log_samples", True))
        base, theirs = model.base_model(), None
        if base is not None:
            cached = CachingLM(base, given.cache_db) if isinstance(given, CachingLM) else base
            theirs = again(**{**kwargs, "lm": cached, "log_samples": True})
        model.start_counting()
        ours = again(**{**kwargs, "log_samples": True})
        if ours is None:  # a process that gathers no results
            return None
        tasks = cast("Mapping[str, Any]", kwargs["task_dict"]).get("tasks", {})
        chosen = cast("Mapping[str, list[int]]", kwargs.get("samples") or {})
        for name, task in tasks.items():
            _add_sizes(ours, name, task, model, chosen.get(name))
            if theirs is not None:
                _add_differences(ours, theirs, name, task)
        if not logged:
            del ours["samples"]
        return ours

    evaluate_of_umim_models.__name__ = _EXTENDED
    return evaluate_of_umim_models


def _add_sizes(
    found: Results, name: str, task: Task, model: SizedModel, chosen: Sequence[int] | None
) -> None:
    """Add the sizes of requests to a task's samples, and its token reduction to its results."""
    sizes: dict[int, list[Sizes | None]] = {}
    for request in sorted(task.instances, key=lambda request: int(request.idx)):
        question = int(request.doc_id)
        number = chosen[question] if chosen else question  # as lm-eval's samples count
        sizes.setdefault(number, []).append(model.sizes_of(request))
    known = [size for row in sizes.values() for size in row if size is not None]
    if not known:
        return
    total = sum(known, Sizes())
    row = found["results"][name]
    row["token_reduction,none"] = 1 - total.units / total.tokens
    if total.context_token_reduction is not None:
        row["context_token_reduction,none"] = total.context_token_reduction
    for sample in found["samples"][name]:
        sample["umim"] = [size and _described(size) for size in sizes[sample["doc_id"]]]


def _described(size: Sizes) -> dict[str, float | None]:
    return {**asdict(size), "context_token_reduction": size.context_token_reduction}


def _add_differences(ours: Results, theirs: Results, name: str, task: Task) -> None:
    """Add the base model's metrics and the paired differences of a task to its results."""
    row, other = ours["results"][name], theirs["results"][name]
    better = ours["higher_is_better"].get(name, {})
    filters = dict.fromkeys(sample["filter"] for sample in ours["samples"][name])
    for key in filters:
        pairs = _paired(ours["samples"][name], theirs["samples"][name], name, key)
        for own, base in pairs:
            own["base"] = {
                "filtered_resps": base["filtered_resps"],
                **{metric: base[metric] for metric in base["metrics"]},
            }
        for metric in dict.fromkeys(metric for own, _ in pairs for metric in own["metrics"]):
            at, error_at = f"{metric},{key}", f"{metric}_stderr,{key}"
            values = [(o[metric], b[metric]) for o, b in pairs if metric in o and metric in b]
            figures = (row.get(at), other.get(at))
            if not all(isinstance(figure, int | float) for figure in figures) or not all(
                value is not None for pair in values for value in pair
            ):
                continue  # --predict_only, a task that is not run
            error = _difference_error(values, task.aggregation().get(metric, mean))
            row[f"{metric}_base,{key}"] = other[at]
            row[f"{metric}_base_stderr,{key}"] = other.get(error_at, _UNKNOWN)
            row[f"{metric}_difference,{key}"] = row[at] - other[at]
            row[f"{metric}_difference_stderr,{key}"] = _UNKNOWN if error is None else error
            for added in ("base", "difference"):
                better[f"{metric}_{added}"] = better.get(metric)


def _paired(
    ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], name: str, key: str
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the samples of two models by question."""
    own, base = ([s for s in side if s["filter"] == key] for side in (ours, theirs))
    asked, answered = ([(s["doc_id"], s["doc_hash"]) for s in side] for side in (own, base))
    if asked != answered:
        raise EvaluationError(
            f"both models must answer the same questions of {name}",
            "other questions",
            "Use a task whose questions do not change from one reading to the next.",
        )
    return list(zip(own, base, strict=True))


def _difference_error(
    values: Sequence[tuple[Any, Any]], aggregate: Callable[[Sequence[Any]], float]
) -> float | None:
    own, base = [value for value, _ in values], [value for _, value in values]
    if aggregate is mean:
        return mean_difference_error(own, base)
    return bootstrap_difference_error(own, base, aggregate)
