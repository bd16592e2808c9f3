"""pass@k, unbiased."""

from __future__ import annotations

from itertools import combinations

import pytest

from umim_core.evaluation.text_metrics.code_tests import pass_at_k, pass_figures


@pytest.mark.parametrize("right", range(6))
@pytest.mark.parametrize("k", [1, 2, 5])
def test_it_is_the_share_of_draws_that_hold_a_right_answer(right: int, k: int) -> None:
    answers = [True] * right + [False] * (5 - right)
    draws = list(combinations(answers, k))
    assert pass_at_k(5, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_orders_beyond_the_number_of_answers_are_left_out() -> None:
    assert pass_figures([True]) == {"pass@1": 1.0}
    assert pass_figures([True, False, False, False]) == {"pass@1": 0.25, "pass@4": 1.0}
