"""pass@k: the chance that one of k answers to a question is right."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from typing import Final

PASS_ORDERS: Final = (1, 4, 8, 16)
PASS_FIGURES: Final = tuple(f"pass@{k}" for k in PASS_ORDERS)


def pass_at_k(answers: int, right: int, k: int) -> float:
    """Estimate pass@k of a question without bias: 1 - C(n - c, k) / C(n, k).

    ::

        n = 4 answers, c = 1 right, k = 2:  3 of 6 pairs hold the right one, 1 - 3/6 = 0.5

    Source: Chen et al., 2021, "Evaluating Large Language Models Trained on Code", equation 1.
    """
    return 1.0 - comb(answers - right, k) / comb(answers, k)


def pass_figures(right: Sequence[bool]) -> dict[str, float]:
    """Return pass@k by name, for every order that there are answers for."""
    answers, correct = len(right), sum(right)
    return {f"pass@{k}": pass_at_k(answers, correct, k) for k in PASS_ORDERS if k <= answers}
