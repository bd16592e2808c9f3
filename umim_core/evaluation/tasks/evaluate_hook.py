"""lm-eval's ``evaluate`` for our models: sizes of requests, and differences to the base model.

    results of a task    acc, token_reduction, context_token_reduction
                         with a base model: acc_base, acc_difference, each with its standard error
    a logged sample      umim: tokens and units of every request
                         with a base model, base: its responses and metrics of the same question

lm-eval 0.4.13 gives a model its requests, never its tasks, and offers no other place for this. The
first model of ours puts a function in the place of ``lm_eval.evaluator.evaluate``; other models
pass through it unchanged. Who took lm-eval's function before that calls the old one: a model with
``compare=base`` then refuses its first request.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import wraps
from inspect import signature
from typing import Any, Final, ParamSpec, cast

import numpy as np
from lm_eval import evaluator
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean
from lm_eval.api.model import CachingLM
from lm_eval.api.task import Task
from lm_eval.evaluator_utils import _handle_back_comp

from umim_core.backbone.devices import forked_generators
from umim_core.errors import EvaluationError
from umim_core.evaluation.paired_differences import (
    bootstrap_difference_error,
    mean_difference_error,
)
from umim_core.evaluation.scoring import Sizes, counted_sizes
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
        named = signature(evaluate).bind(*args, **kwargs).arguments
        lm = named["lm"]
        model = lm.lm if isinstance(lm, CachingLM) else lm
        if not isinstance(model, SizedModel):
            return evaluate(*args, **kwargs)
        model.chats.applied = bool(named.get("apply_chat_template"))
        again = cast("Callable[..., Results | None]", evaluate)
        logged = bool(named.get("log_samples", True))
        asked = named["task_dict"]  # in either of the forms that lm-eval takes
        tasks: dict[str, Task] = asked["tasks"] if "tasks" in asked else _handle_back_comp(asked)[1]
        base, theirs = model.base_model(), None
        if base is not None:
            cached = CachingLM(base, lm.cache_db) if isinstance(lm, CachingLM) else base
            drawn = [(generator, generator.getstate()) for generator in _generators(tasks)]
            with _global_generators_kept(model):
                theirs = again(**{**named, "lm": cached, "log_samples": True})
            for generator, state in drawn:  # both models see the same examples in the prompt
                generator.setstate(state)
        model.start_counting()
        try:
            ours = again(**{**named, "log_samples": True})
            if ours is None:  # a process that gathers no results
                return None
            chosen = cast("Mapping[str, list[int]]", named.get("samples") or {})
            for name, task in tasks.items():
                _add_sizes(ours, name, task, model, chosen.get(name))
                if theirs is not None:
                    _add_differences(ours, theirs, name, task)
        finally:
            model.stop_counting()
        if not logged:
            del ours["samples"]
        return ours

    evaluate_of_umim_models.__name__ = _EXTENDED
    return evaluate_of_umim_models


@contextmanager
def _global_generators_kept(model: SizedModel) -> Iterator[None]:
    """Put the global random generators back: what follows draws as if nothing had drawn."""
    plain, numbers = random.getstate(), np.random.get_state()
    try:
        with forked_generators(model.device):
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(numbers)


def _generators(tasks: Mapping[str, Task]) -> list[random.Random]:
    """Return the generators that draw the examples of prompts; lm-eval seeds them once."""
    holders = [vars(task) for task in tasks.values()]
    holders += [vars(held["sampler"]) for held in holders if "sampler" in held]
    return [
        value for held in holders for value in held.values() if isinstance(value, random.Random)
    ]


def _add_sizes(
    results: Results, name: str, task: Task, model: SizedModel, chosen: Sequence[int] | None
) -> None:
    """Add the sizes of requests to a task's samples, and its token reduction to its results."""
    asked: dict[int, list[tuple[Instance, Sizes | None]]] = {}
    for request in sorted(task.instances, key=lambda request: int(request.idx)):
        question = int(request.doc_id)
        number = chosen[question] if chosen else question  # as lm-eval's samples count
        asked.setdefault(number, []).append((request, model.sizes_of(request)))
    known = [
        size
        for row in asked.values()
        for size in counted_sizes([(str(request.args[0]), size) for request, size in row])
    ]
    if not known:
        return
    total = sum(known, Sizes())
    row = results["results"][name]
    row["token_reduction,none"] = 1 - total.units / total.tokens
    if total.context_token_reduction is not None:
        row["context_token_reduction,none"] = total.context_token_reduction
    if total.columns is not None:
        row["cache_reduction,none"] = 1 - total.columns / total.context_tokens
    if total.shortfall:
        row["shortfall,none"] = total.shortfall / total.context_tokens
    for sample in results["samples"][name]:
        sample["umim"] = [size and _described(size) for _, size in asked[sample["doc_id"]]]


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
    asked, answered = (
        [(s["doc_id"], s["doc_hash"], s["prompt_hash"]) for s in side] for side in (own, base)
    )
    if asked != answered:
        raise EvaluationError(
            f"both models must answer the same questions of {name}, behind the same prompts",
            "other questions or prompts",
            "Use a task whose prompts do not change from one reading to the next.",
        )
    return list(zip(own, base, strict=True))


def _difference_error(
    values: Sequence[tuple[Any, Any]], aggregate: Callable[[Sequence[Any]], float]
) -> float | None:
    own, base = [value for value, _ in values], [value for _, value in values]
    if aggregate is mean:
        return mean_difference_error(own, base)
    return bootstrap_difference_error(own, base, aggregate)
