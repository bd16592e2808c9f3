"""Standard errors over rows of text: tokens of one row depend on each other, rows do not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Numbers = Sequence[float] | NDArray[np.floating]


def increase_with_error(
    own: Sequence[float], other: Sequence[float], counts: Sequence[int]
) -> tuple[float, float | None]:
    """Return how much larger one mean over tokens is than another of the same rows.

    Args:
        own: Sum of each row [B].
        other: The same of what the difference is taken to [B].
        counts: Tokens of each row [B].

    Returns:
        The difference, and its standard error, paired by row (``ratio_error``).
    """
    steps = [mine - theirs for mine, theirs in zip(own, other, strict=True)]
    return sum(steps) / sum(counts), ratio_error(steps, counts)


def ratio_error(sums: Numbers, counts: Numbers) -> float | None:
    """Return the standard error of a mean over tokens whose rows were drawn, not its tokens.

    The mean is sum(sums) / sum(counts). For a difference of two models on the same rows, give the
    differences of their sums: what rows have in common then cancels.

    Args:
        sums: Sum of the values of each row [B].
        counts: How many values each row has [B].

    Returns:
        The error, or None where fewer than two rows have a value.

    Source: Cochran, Sampling Techniques, 3rd ed., 2.11 (ratio of two totals).
    """
    total, parts = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    total, parts = total[parts > 0], parts[parts > 0]
    rows = len(parts)
    if rows < 2:
        return None
    rest = total - total.sum() / parts.sum() * parts
    return math.sqrt(rows / (rows - 1) * float(rest @ rest)) / float(parts.sum())
