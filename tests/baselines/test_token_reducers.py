"""Token reducers: exact budgets, protected tokens, and a method that breaks the protocol."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umim_core.baselines.methods import Ints, Text, reduce_tokens
from umim_core.baselines.truncation import Truncation
from umim_core.errors import EvaluationError

NOTHING = np.array([], dtype=np.int64)


def text(*protected: bool) -> Text:
    return Text(np.arange(len(protected), dtype=np.int64), np.array(protected), NOTHING)


def test_truncation_keeps_the_end_and_what_is_protected() -> None:
    worked = text(True, False, False, False, False, False)
    assert reduce_tokens(Truncation(), worked, 3).tolist() == [0, 4, 5]
    assert reduce_tokens(Truncation(), text(False, False, False), 2).tolist() == [1, 2]


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.data())
def test_truncation_keeps_exactly_the_budget(flags: list[bool], data: st.DataObject) -> None:
    budget = data.draw(st.integers(1, len(flags)))
    kept = reduce_tokens(Truncation(), text(*flags), budget)
    assert len(kept) == max(budget, sum(flags))
    assert set(np.flatnonzero(flags)) <= set(kept.tolist())


@pytest.mark.parametrize("kept", [[], [0], [1, 0], [0, 0], [-1, 2], [1, 3]])
def test_a_choice_that_is_not_of_the_budget_and_in_order_is_refused(kept: list[int]) -> None:
    class Broken:
        def keep(self, text: Text, budget: int) -> Ints:
            return np.array(kept, dtype=np.int64)

    with pytest.raises(EvaluationError, match="must keep 2 of 3 tokens, in order"):
        reduce_tokens(Broken(), text(False, False, False), 2)


def test_a_choice_that_loses_a_protected_token_is_refused() -> None:
    class Heedless:
        def keep(self, text: Text, budget: int) -> Ints:
            return np.arange(budget)

    with pytest.raises(EvaluationError, match="token 2 is lost"):
        reduce_tokens(Heedless(), text(False, False, True), 2)
