"""Warm-up and decay: a worked example, the ends, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umim_core.errors import ConfigError
from umim_core.training.optimizer import linear_warmup_decay


def factors(total: int, fraction: float) -> list[float]:
    return [linear_warmup_decay(step, total, fraction) for step in range(total)]


def test_ten_steps_with_two_of_warm_up() -> None:
    rising, falling = [1 / 2, 1.0], [step / 9 for step in range(8, 0, -1)]
    assert factors(10, 0.2) == pytest.approx(rising + falling)


def test_the_default_warms_up_over_a_tenth() -> None:
    assert [linear_warmup_decay(step, 1000) for step in (0, 49, 99)] == [0.01, 0.5, 1.0]
    assert linear_warmup_decay(100, 1000) == pytest.approx(900 / 901)


@given(st.integers(1, 400), st.floats(0.0, 0.99))
def test_it_rises_to_one_then_falls_and_never_wastes_a_step(total: int, fraction: float) -> None:
    values = factors(total, fraction)
    peak = values.index(max(values))
    assert all(0.0 < value <= 1.0 for value in values)
    assert all(a < b for a, b in pairwise(values[: peak + 1]))
    assert all(a > b for a, b in pairwise(values[peak:]))


def test_beyond_the_plan_the_rate_is_zero() -> None:
    assert [linear_warmup_decay(step, 5, 0.2) for step in (5, 6, 100)] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("total", "fraction"), [(0, 0.1), (-1, 0.1), (10, -0.1), (10, 1.0), (10, float("nan"))]
)
def test_arguments_out_of_bounds_are_refused(total: int, fraction: float) -> None:
    with pytest.raises(ConfigError, match=rf"warm-up fraction in \[0, 1\); got {total} steps"):
        linear_warmup_decay(0, total, fraction)
