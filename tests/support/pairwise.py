"""Products of parameters: every pair of values in the quick set, the whole product in the full one.

    @pairwise(name=["llama", "gpt2"], rows=[1, 8], infix_free=[True, False])

runs four of eight combinations quickly: each name meets each number of rows and each kind of rules.
A fault that needs three values at once is left to ``make test-full``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

import pytest


def covering(axes: Sequence[Sequence[object]]) -> list[tuple[int, ...]]:
    """Return combinations, as indices into the axes, that hold every pair of values of two axes.

    Greedy: of all combinations the first that holds most pairs not held yet.
    """

    def pairs(chosen: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(combinations(enumerate(chosen), min(2, len(axes))))

    everything = list(product(*(range(len(axis)) for axis in axes)))
    missing = set().union(*map(pairs, everything))
    found = []
    while missing:
        best = max(everything, key=lambda chosen: len(pairs(chosen) & missing))
        found.append(best)
        missing -= pairs(best)
    return found


def pairwise(**axes: Sequence[object]) -> pytest.MarkDecorator:
    """Parametrize with the product of the axes; what pairs do not need is marked ``full``."""
    quick = set(covering(list(axes.values())))
    chosen = product(*(range(len(axis)) for axis in axes.values()))
    return pytest.mark.parametrize(
        list(axes),
        [
            pytest.param(
                *(axis[i] for axis, i in zip(axes.values(), indices, strict=True)),
                marks=() if indices in quick else pytest.mark.full,
            )
            for indices in chosen
        ],
    )
