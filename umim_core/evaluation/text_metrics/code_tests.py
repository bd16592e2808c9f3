"""Unit tests of generated code: the prompt's function, completed, must pass the row's tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb
from typing import Any, Final

from umim_core.evaluation.sandbox.code_sandbox import run_confined
from umim_core.evaluation.text_metrics.text_metric import add_text_metric

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


@add_text_metric("code_tests", *PASS_FIGURES, runs_code=True)
def code_tests(texts: Sequence[str], row: Mapping[str, Any]) -> dict[str, float]:
    """Return pass@k: every answer runs behind its prompt, in the sandbox.

    The row's ``test`` defines ``check``, which gets the function that ``entry_point`` names.

    Source: HumanEval (Chen et al., 2021).
    """
    check = f"\n{row['test']}\ncheck({row['entry_point']})\n"
    return pass_figures([run_confined(row["prompt"] + text + check).passed for text in texts])
