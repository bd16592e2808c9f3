"""lm-eval's ``evaluate`` for a model with ``compare=base``: both models, paired by question.

    results of a task    acc, acc_base, acc_difference, each with its standard error
    a logged sample      base: responses and metrics of the base model for the same question

lm-eval 0.4.13 gives a model its requests, never its tasks, and offers no other place for this than
``lm_eval.evaluator.evaluate``, which the first model of ours replaces; other models pass through.
Who took lm-eval's function before that calls the old one: the model then refuses its requests.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, Final, ParamSpec, cast

import numpy as np
from lm_eval import evaluator
from lm_eval.api.metrics import mean
from lm_eval.api.task import Task
from lm_eval.evaluator_utils import _handle_back_comp

from umim_core.backbone.devices import forked_generators
from umim_core.errors import EvaluationError, require
from umim_core.evaluation.standard_errors import (
    bootstrap_difference_error,
    mean_difference_error,
)

if TYPE_CHECKING:
    from umim_core.evaluation.harness import UmimLM

P = ParamSpec("P")
Results = dict[str, Any]
_UNKNOWN: Final = "N/A"  # lm-eval's word for a standard error that there is not
_EXTENDED: Final = "evaluate_of_umim_models"


def compare_in_evaluate(kind: type[UmimLM]) -> None:
    """Put the extension for our class in the place of lm-eval's function, once a process."""
    if evaluator.evaluate.__name__ != _EXTENDED:
        evaluator.evaluate = _extended(evaluator.evaluate, kind)


def _extended(
    evaluate: Callable[P, Results | None], kind: type[UmimLM]
) -> Callable[P, Results | None]:
    @wraps(evaluate)
    def evaluate_of_umim_models(*args: P.args, **kwargs: P.kwargs) -> Results | None:
        named = signature(evaluate).bind(*args, **kwargs).arguments
        model = named["lm"]  # a CachingLM merges nothing
        if isinstance(model, kind):
            model.chats.applied = bool(named.get("apply_chat_template"))
        if not isinstance(model, kind) or model.compare is None:
            return evaluate(*args, **kwargs)
        task_dict = named["task_dict"]  # in either of the forms that lm-eval takes
        tasks: dict[str, Task] = task_dict.get("tasks") or _handle_back_comp(task_dict)[1]
        again = cast("Callable[..., Results | None]", evaluate)
        with _generators_kept(tasks, model):
            theirs = again(**{**named, "lm": model.base_model(), "log_samples": True})
        model.is_compared = True
        try:
            ours = again(**{**named, "log_samples": True})
        finally:
            model.is_compared = False
        if ours is None or theirs is None:  # a process that gathers no results
            return None
        for name, task in tasks.items():
            _add_differences(ours, theirs, name, task)
        if not named.get("log_samples", True):
            del ours["samples"]
        return ours

    evaluate_of_umim_models.__name__ = _EXTENDED
    return evaluate_of_umim_models


@contextmanager
def _generators_kept(tasks: Mapping[str, Task], model: UmimLM) -> Iterator[None]:
    """Put random generators back: both models see the same examples in the prompt."""
    holders = [vars(task) for task in tasks.values()]
    holders += [vars(holder["sampler"]) for holder in holders if "sampler" in holder]
    drawing = [value for holder in holders for value in holder.values()]
    drawing = [value for value in drawing if isinstance(value, random.Random)]  # seeded once
    states = [generator.getstate() for generator in drawing]
    plain, numbers = random.getstate(), np.random.get_state()
    try:
        with forked_generators(model.device):
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(numbers)
        for generator, state in zip(drawing, states, strict=True):
            generator.setstate(state)


def _add_differences(ours: Results, theirs: Results, name: str, task: Task) -> None:
    row, other = ours["results"][name], theirs["results"][name]
    better = ours["higher_is_better"].get(name, {})
    for key in dict.fromkeys(sample["filter"] for sample in ours["samples"][name]):
        pairs = _paired(ours["samples"][name], theirs["samples"][name], name, key)
        for umim, base in pairs:
            kept = ("filtered_resps", *base["metrics"])
            umim["base"] = {figure: base[figure] for figure in kept}
        for metric in dict.fromkeys(metric for umim, _ in pairs for metric in umim["metrics"]):
            at, error_at = f"{metric},{key}", f"{metric}_stderr,{key}"
            values = [(o[metric], b[metric]) for o, b in pairs if metric in o and metric in b]
            measured = all(isinstance(side.get(at), int | float) for side in (row, other))
            if not measured or any(None in pair for pair in values):
                continue  # --predict_only, a task that is not run
            aggregate = task.aggregation().get(metric, mean)
            sides = [value for value, _ in values], [value for _, value in values]
            if aggregate is mean:
                error = mean_difference_error(*sides)
            else:
                error = bootstrap_difference_error(*sides, aggregate)
            row[f"{metric}_base,{key}"] = other[at]
            row[f"{metric}_base_stderr,{key}"] = other.get(error_at, _UNKNOWN)
            row[f"{metric}_difference,{key}"] = row[at] - other[at]
            row[f"{metric}_difference_stderr,{key}"] = _UNKNOWN if error is None else error
            better |= {f"{metric}_{added}": better.get(metric) for added in ("base", "difference")}


def _paired(
    ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], name: str, key: str
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    umim, base = ([s for s in side if s["filter"] == key] for side in (ours, theirs))
    questions, same = (
        [(s["doc_id"], s["doc_hash"], s["prompt_hash"]) for s in side] for side in (umim, base)
    )
    rule = f"both models must answer the same questions of {name}, behind the same prompts"
    remedy = "Use a task whose prompts do not change from one reading to the next."
    require(questions == same, EvaluationError, rule, "other questions or prompts", remedy)
    return list(zip(umim, base, strict=True))
