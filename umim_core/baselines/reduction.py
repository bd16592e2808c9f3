"""Token reduction of one text: exact budgets, protected tokens, realised rate and cost.

With T = 5, a protected first token, scores that a method gives, and a budget of 3::

    ids       <s>   a    b    c    d
    scores          2    1    2    1        the highest stay; of equal ones the first
    kept      <s>   a         c             K = 2 dropped, token reduction 2 / 5

Shapes: T raw tokens, K kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from umim_core.baselines.methods import Ints, Text, TokenReducer
from umim_core.errors import EvaluationError


@dataclass(frozen=True)
class Reduction:
    """Tokens of a text that stay, with what choosing them cost.

    Attributes:
        kept: Their indices [K] (int64), rising.
        tokens: Tokens T of the text.
        budget: Tokens that were to stay.
        seconds: Wall-clock time of the choice.
        flops: Estimated floating-point operations of the choice.
    """

    kept: Ints
    tokens: int
    budget: int
    seconds: float
    flops: int

    @property
    def token_reduction(self) -> float:
        """Realised token reduction (T - K) / T; 0 for an empty text."""
        return (self.tokens - len(self.kept)) / self.tokens if self.tokens else 0.0

    @property
    def shortfall(self) -> int:
        """Tokens that stay beyond the budget, because they are protected."""
        return len(self.kept) - self.budget


def reduce_tokens(reducer: TokenReducer, text: Text, budget: int) -> Reduction:
    """Choose the tokens that stay, and check the choice against the protocol.

    Args:
        reducer: Chooses. It is not asked where nothing is to be chosen: an empty text, or a budget
            of all tokens.
        text: The text; it may be empty.
        budget: Tokens that shall stay, 1 .. T, or 0 of an empty text. Protected tokens stay even if
            they are more, and the result says how many were.

    Raises:
        EvaluationError: If the budget is out of range, or the choice is not rising, not of the
            budget's size, or lacks a protected token.
    """
    tokens = len(text.ids)
    if not min(1, tokens) <= budget <= tokens:
        raise EvaluationError(
            f"the budget of a text must lie between {min(1, tokens)} and its {tokens} tokens",
            budget,
            "Give the number of tokens that stay.",
        )
    wanted = max(budget, int(text.protected.sum()))
    if wanted == tokens:
        return Reduction(np.arange(tokens), tokens, budget, 0.0, 0)
    start = perf_counter()
    kept = reducer.keep(text, wanted)
    seconds = perf_counter() - start
    _check_choice(kept, text, wanted, type(reducer).__name__)
    return Reduction(kept, tokens, budget, seconds, reducer.flops(text, wanted))


def _check_choice(kept: Ints, text: Text, wanted: int, name: str) -> None:
    """Refuse indices that are not ``wanted`` ones of a text, in order, protected ones included."""
    bounded = np.concatenate([[-1], kept, [len(text.ids)]])
    if len(kept) != wanted or bool((np.diff(bounded) < 1).any()):
        raise EvaluationError(
            f"a token reducer must keep {wanted} of {len(text.ids)} tokens, in order",
            kept.tolist(),
            f"{name}.keep breaks the protocol.",
        )
    if lost := set(np.flatnonzero(text.protected).tolist()).difference(kept.tolist()):
        raise EvaluationError(
            "a token reducer must keep protected tokens",
            f"token {min(lost)} is lost",
            f"{name}.keep breaks the protocol.",
        )


def highest(scores: NDArray[np.float64], protected: NDArray[np.bool_], budget: int) -> Ints:
    """Return the protected tokens and those of the highest scores; of equal ones the first.

    Args:
        scores: A number per token [T]; those of protected tokens do not count.
        protected: Tokens that must stay [T] (bool), at most ``budget``.
        budget: Tokens that stay, at most T.

    Returns:
        Indices [budget] (int64), rising.
    """
    order = np.lexsort((np.arange(len(scores)), -scores, ~protected))
    return np.sort(order[:budget])
