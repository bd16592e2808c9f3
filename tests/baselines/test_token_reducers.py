"""Token reducers: exact budgets, protected tokens, and a method that breaks the protocol."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umim_core.baselines.methods import Ints, TargetReduction, Text, reduce_tokens
from umim_core.baselines.truncation import Truncation
from umim_core.errors import EvaluationError

NOTHING = np.array([], dtype=np.int64)


def text(*protected: bool) -> Text:
    return Text(np.arange(len(protected), dtype=np.int64), np.array(protected), NOTHING)


def test_truncation_keeps_the_end_and_what_is_protected() -> None:
    worked = text(True, False, False, False, False, False)
    assert reduce_tokens(Truncation(), worked, 3).kept.tolist() == [0, 4, 5]
    assert reduce_tokens(Truncation(), text(False, False, False), 2).kept.tolist() == [1, 2]


def test_empty_and_one_token_texts_are_kept_whole() -> None:
    assert reduce_tokens(Truncation(), text(), 0).kept.tolist() == []
    assert reduce_tokens(Truncation(), text(), 0).token_reduction == 0
    assert reduce_tokens(Truncation(), text(False), 1).kept.tolist() == [0]


@pytest.mark.parametrize(("tokens", "budget"), [(0, 1), (3, 0), (3, 4)])
def test_a_budget_beyond_the_text_is_refused(tokens: int, budget: int) -> None:
    with pytest.raises(EvaluationError, match="the budget of a text must lie between"):
        reduce_tokens(Truncation(), text(*[False] * tokens), budget)


@pytest.mark.parametrize("kept", [[], [0], [1, 0], [0, 0], [-1, 2], [1, 3]])
def test_a_choice_that_is_not_of_the_budget_and_in_order_is_refused(kept: list[int]) -> None:
    class Broken(Truncation):
        def keep(self, text: Text, budget: int) -> Ints:
            return np.array(kept, dtype=np.int64)

    with pytest.raises(EvaluationError, match="must keep 2 of 3 tokens, in order"):
        reduce_tokens(Broken(), text(False, False, False), 2)


def test_a_choice_that_loses_a_protected_token_is_refused() -> None:
    class Heedless(Truncation):
        def keep(self, text: Text, budget: int) -> Ints:
            return np.arange(budget)

    with pytest.raises(EvaluationError, match="token 2 is lost"):
        reduce_tokens(Heedless(), text(False, False, True), 2)


@pytest.mark.parametrize(
    ("target", "tokens", "stay"),
    [(0.14, 50, 43), (0.14, 10, 9), (0.14, 3, 3), (0.3, 7, 5), (0.6, 1, 1), (0.99, 40, 1)],
)
def test_a_target_drops_its_share_rounded(target: float, tokens: int, stay: int) -> None:
    assert TargetReduction(target).stays(tokens) == stay


@given(st.floats(0.01, 0.99), st.integers(1, 60), st.integers(1, 60))
def test_the_longest_end_of_a_text_is_taken_whose_share_fits(
    target: float, tokens: int, room: int
) -> None:
    wanted = TargetReduction(target)
    ids, stay = wanted.fit(np.arange(tokens), room)
    fitting = [length for length in range(1, tokens + 1) if wanted.stays(length) <= room]
    assert ids.tolist() == list(range(tokens - max(fitting), tokens))
    assert stay == wanted.stays(len(ids))
