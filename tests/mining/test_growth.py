"""The law of growth: recovered from samples, and never falling."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umim_core.mining.growth import GrowthLaw

SIZES = [1 << 17, 1 << 18, 1 << 19, 1 << 20]


def by_doublings(first: float, exponent: float, decay: float, count: int) -> list[float]:
    """Multiply step by step: each doubling of the corpus has ``decay`` times the last exponent."""
    values = [first]
    for _ in range(count):
        values.append(values[-1] * 2**exponent)
        exponent *= decay
    return values


@given(
    exponent=st.floats(0.2, 1.0),
    decay=st.floats(0.6, 1.0),
    first=st.floats(1e5, 1e9),
)
def test_a_synthetic_law_is_recovered(exponent: float, decay: float, first: float) -> None:
    truth = by_doublings(first, exponent, decay, 9)
    law = GrowthLaw.fit(SIZES, [round(value) for value in truth[:4]])
    assert law.decay == pytest.approx(decay, abs=0.01)
    assert law.exponent == pytest.approx(exponent * decay**3, rel=0.02)
    for doublings in range(6):
        assert law.at(SIZES[-1] << doublings) == pytest.approx(truth[3 + doublings], rel=0.03)


@given(
    values=st.lists(st.integers(0, 10**12), min_size=4, max_size=4).map(sorted),
    at=st.lists(st.floats(0, 1e15), min_size=2, max_size=8).map(sorted),
)
def test_it_never_falls_whatever_was_seen(values: list[int], at: list[float]) -> None:
    law = GrowthLaw.fit(SIZES, values)
    found = [law.at(tokens) for tokens in at]
    assert found == sorted(found)
    assert law.at(SIZES[-1]) == values[-1]
    assert 0.5 <= law.decay <= 1.0


def test_growth_that_speeds_up_is_continued_as_a_power() -> None:
    law = GrowthLaw.fit(SIZES, [100, 110, 140, 300])
    assert law.decay == 1.0
    assert law.at(SIZES[-1] * 4) / law.at(SIZES[-1] * 2) == pytest.approx(2**law.exponent)


def test_what_stopped_growing_hardly_grows() -> None:
    law = GrowthLaw.fit(SIZES, [500, 500, 500, 500])
    assert 500 <= law.at(1e12) < 520


def test_what_never_occurred_is_not_expected() -> None:
    assert GrowthLaw.fit(SIZES, [0, 0, 0, 0]).at(1e12) == 0.0
