"""Rows of a task adaptation: one per backbone, setting and threshold, over the seeds of a point.

Made of ``adaptation.json``; page, figure and summaries read the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import hypot, sqrt
from statistics import fmean, stdev
from typing import Final

from tasks.report.page_template import Report

CONTROL: Final = "control"
RULES_ALONE: Final = "WT + Rules"  # what training is compared with, at equal threshold
CLEAR: Final = 2.0  # standard errors of a difference that counts
_MEANS: Final = (
    *("rules", "token_reduction", "input_reduction", "accuracy", "margin", "gained", "lost"),
    *("difference", "difference_se", "margin_difference", "margin_difference_se"),
)


def adaptation_rows(place: Report) -> list[Report]:
    """Return the rows of a backbone, in the order in which its points are listed.

    A row holds the means over seeds of a point's figures, the number of ``seeds``, the ``spread``
    (standard deviation of the accuracy over seeds; None for one) and two differences to the base
    model on the same questions, ``change`` (accuracy) and ``margin_change``, each with ``std``, the
    standard error over questions. ``error`` is that of ``change`` over questions and seeds.
    ``against`` has ``difference`` and ``error`` of the accuracy to other models, by their names.

    Args:
        place: An entry of ``backbones``.
    """
    groups: dict[tuple[str, int | None], list[Report]] = {}
    for point in place["points"]:
        groups.setdefault((point["setting"], point["tau"]), []).append(point)
    return [_row(points) for points in groups.values()]


def _row(points: list[Report]) -> Report:
    mean = {name: _mean(point.get(name) for point in points) for name in _MEANS}
    compared = [point.get("against", {}) for point in points]
    names = dict.fromkeys(name for found in compared for name in found)
    return {
        **{name: points[0][name] for name in ("setting", "kind", "tau")},
        **mean,
        "trained": any(point["seed"] is not None for point in points),
        "seeds": len({point["seed"] for point in points} - {None}),
        "spread": _spread(points),
        "change": {"mean": mean["difference"], "std": mean["difference_se"]},
        "margin_change": {"mean": mean["margin_difference"], "std": mean["margin_difference_se"]},
        "error": _error(points),
        "against": {
            name: _compared([found[name] for found in compared if name in found]) for name in names
        },
    }


def _compared(seeds: list[Report]) -> Report:
    return {"difference": _mean(one["difference"] for one in seeds), "error": _error(seeds)}


def _error(seeds: list[Report]) -> float | None:
    """Return the standard error of a mean difference, over questions and seeds."""
    questions, spread = _mean(one.get("difference_se") for one in seeds), _spread(seeds)
    if questions is None or spread is None:
        return questions
    return hypot(questions, spread / sqrt(len(seeds)))


def _spread(seeds: list[Report]) -> float | None:
    """Return the standard deviation over seeds; a difference to the base has the accuracy's."""
    return stdev(one["difference"] for one in seeds) if len(seeds) > 1 else None


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def label(row: Report) -> str:
    """Return a row's setting in words, with its threshold where it has one."""
    return f"{row['setting']}" + ("" if row["tau"] is None else f" at τ {row['tau']}")


def clear(difference: float | None, error: float | None) -> int:
    """Return 1 or -1 for a difference beyond two standard errors, 0 for one that may be chance."""
    if difference is None or error is None or abs(difference) <= CLEAR * error:
        return 0
    return 1 if difference > 0 else -1
