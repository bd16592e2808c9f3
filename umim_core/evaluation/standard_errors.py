"""Standard errors of means, and of differences between two models, paired by question.

What the questions have in common cancels: on the same questions the error of a difference is a
fraction of the errors of the two accuracies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

V = TypeVar("V")
Numbers = Sequence[float] | NDArray[np.number]
_DRAWS: Final = 200  # of the bootstrap: its error then has an error of 5 %
_SEED: Final = 0


def mean_difference_error(values: Sequence[float], base: Sequence[float]) -> float | None:
    """Return the standard error of mean(values) - mean(base), values of the same questions [Q].

    None for fewer than two questions.
    """
    return mean_error([value - other for value, other in zip(values, base, strict=True)])


def mean_error(values: Numbers) -> float | None:
    """Return the standard error of a mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    return float(np.std(np.asarray(values, dtype=np.float64), ddof=1)) / math.sqrt(len(values))


def bootstrap_difference_error(
    values: Sequence[V], base: Sequence[V], statistic: Callable[[Sequence[V]], float]
) -> float | None:
    """Return the standard error of statistic(values) - statistic(base) by a paired bootstrap.

    Every draw takes the same questions of both models. The same values [Q], of any type, give the
    same error. The statistic is a perplexity of (log-likelihood, words), an F1 score, ...

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 6.2 and 8.3 (paired data).
    """
    if len(values) < 2:
        return None
    draws = np.random.default_rng(_SEED).integers(0, len(values), (_DRAWS, len(values)))
    steps = [
        statistic([values[i] for i in chosen]) - statistic([base[i] for i in chosen])
        for chosen in draws.tolist()
    ]
    return float(np.std(steps, ddof=1))


def ratio_error(sums: Numbers, counts: Numbers) -> float | None:
    """Return the standard error of a mean over tokens whose rows were drawn, not its tokens.

    The mean is sum(sums) / sum(counts) over rows [B]; None where fewer than two rows have a value.
    For a difference of two models on the same rows, give the differences of their sums: what rows
    have in common then cancels.

    Source: Cochran, Sampling Techniques, 3rd ed., 2.11 (ratio of two totals).
    """
    total, parts = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    total, parts = total[parts > 0], parts[parts > 0]
    rows = len(parts)
    if rows < 2:
        return None
    rest = total - total.sum() / parts.sum() * parts
    return math.sqrt(rows / (rows - 1) * float(rest @ rest)) / float(parts.sum())
