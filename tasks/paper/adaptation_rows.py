"""Rows of a task adaptation: one per backbone, setting and threshold, over the seeds of a point.

Made of ``adaptation.json``; page, figure and summaries read the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import hypot, sqrt
from statistics import fmean, stdev
from typing import Final

from tasks.report.render import Report

CONTROL: Final = "control"
RULES_ALONE: Final = "WT + Rules"  # what training is compared with, at equal threshold
CLEAR: Final = 2.0  # standard errors over questions
CLEARLY: Final = (
    f"beyond the root of the squares of {CLEAR:g} standard errors over questions and, of several "
    "seeds, of the standard error over seeds times Student's t (97.5 %, one degree less than seeds)"
)
_STUDENT: Final = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Quantile 97.5 % of Student's t with 1 to 9 degrees of freedom; of more it is less."""
_MEANS: Final = (
    *("rules", "token_reduction", "input_reduction", "accuracy", "margin", "gained", "lost"),
    *("difference", "difference_se", "margin_difference", "margin_difference_se"),
)


def adaptation_rows(place: Report) -> list[Report]:
    """Return the rows of a backbone, in the order in which its points are listed.

    A row holds the means over seeds of a point's figures, the number of ``seeds``, the ``spread``
    (standard deviation of the accuracy over seeds; None for one) and two differences to the base
    model on the same questions, ``change`` (accuracy) and ``margin_change``, each with ``std``, the
    standard error over questions. ``reach`` and ``margin_reach`` are what they must exceed to be
    clear, see :func:`reach`. ``against`` has ``difference`` and ``reach`` of the accuracy to other
    models, by their names. ``kept`` is True where every training kept its start.
    """
    groups: dict[tuple[str, int | None], list[Report]] = {}
    for point in place["points"]:
        groups.setdefault((point["setting"], point["tau"]), []).append(point)
    return [_row(points) for points in groups.values()]


def _row(points: list[Report]) -> Report:
    mean = {name: _mean(point.get(name) for point in points) for name in _MEANS}
    compared = [point.get("against", {}) for point in points]
    names = dict.fromkeys(name for comparison in compared for name in comparison)
    return {
        **{name: points[0][name] for name in ("setting", "kind", "tau")},
        **mean,
        "trained": any(point["seed"] is not None for point in points),
        "kept": all(point.get("best_step") == 0 for point in points),
        "seeds": len({point["seed"] for point in points} - {None}),
        "spread": _spread(points, "difference"),  # the accuracy's: the base model is the same
        "change": {"mean": mean["difference"], "std": mean["difference_se"]},
        "margin_change": {"mean": mean["margin_difference"], "std": mean["margin_difference_se"]},
        "reach": reach(points, "difference"),
        "margin_reach": reach(points, "margin_difference"),
        "against": {
            name: _compared([comparison[name] for comparison in compared if name in comparison])
            for name in names
        },
    }


def _compared(seeds: list[Report]) -> Report:
    mean = _mean(one["difference"] for one in seeds)
    return {"difference": mean, "reach": reach(seeds, "difference")}


def reach(seeds: list[Report], name: str) -> float | None:
    """Return half the width of a 95 % interval around a mean over seeds; None if it is not known.

    It is the root of two squares: of :data:`CLEAR` standard errors over questions, and of the
    standard error over seeds times Student's t. Where nothing differs, at most 5 % of means lie
    beyond it, whichever of the two is the larger. The spread over seeds holds part of that over
    questions, too, so it errs to the wide side.
    """
    questions, spread = _mean(one.get(f"{name}_se") for one in seeds), _spread(seeds, name)
    if questions is None or spread is None:
        return None if questions is None else CLEAR * questions
    student = _STUDENT[min(len(seeds) - 1, len(_STUDENT)) - 1]
    return hypot(CLEAR * questions, student * spread / sqrt(len(seeds)))


def _spread(seeds: list[Report], name: str) -> float | None:
    """Return the standard deviation over seeds; None of one."""
    return stdev(one[name] for one in seeds) if len(seeds) > 1 else None


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def label(row: Report) -> str:
    """Return a row's setting in words, with its threshold where it has one."""
    return f"{row['setting']}" + ("" if row["tau"] is None else f" at τ {row['tau']}")


def clear(difference: float | None, beyond: float | None) -> int:
    """Return 1 or -1 for a difference beyond its :func:`reach`, 0 for one that may be chance."""
    if difference is None or beyond is None or abs(difference) <= beyond:
        return 0
    return 1 if difference > 0 else -1
