"""Token reduction of one text: exact budgets, target rates, protected tokens, realised rate, cost.

With T = 5, a protected first token, scores that a method gives, and a budget of 3::

    ids       <s>   a    b    c    d
    scores          2    1    2    1        the highest stay; of equal ones the first
    kept      <s>   a         c             K = 2 dropped, token reduction 2 / 5

Shapes: T raw tokens, K kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from umim_core.baselines.methods import Ints, Text, TokenReducer
from umim_core.errors import ConfigError, EvaluationError


@dataclass(frozen=True)
class TargetReduction:
    """A token reduction that is asked for: of T tokens round(target * T) go, at most all but one.

    With a target of 0.14, 50 tokens lose 7, 10 lose 1 and 3 lose none. Halves are rounded to the
    even number.

    Attributes:
        target: Share of the tokens that go, above 0 and below 1.

    Raises:
        ConfigError: If it is no such share.
    """

    target: float

    def __post_init__(self) -> None:
        share: object = self.target
        if not isinstance(share, float) or not 0.0 < share < 1.0:
            raise ConfigError(
                "a target token reduction must lie above 0 and below 1",
                share,
                "Give a share of the tokens, such as 0.14.",
            )

    def stays(self, tokens: int) -> int:
        """Return how many of so many tokens stay."""
        return max(1, tokens - round(self.target * tokens))

    def fit(self, ids: Ints, room: int) -> tuple[Ints, int]:
        """Drop leading ids until what stays of the others fits; see ``Scorer.fit``.

        Args:
            ids: Raw ids [T], at least one.
            room: Tokens that may stay.

        Returns:
            The ids left and how many of them stay.

        Raises:
            EvaluationError: If there is no room for a single token.
        """
        if room < 1:
            raise EvaluationError(
                "there must be room for a token of the context",
                f"room for {room}",
                "Shorten the continuation, or use a backbone with more positions.",
            )
        while (over := self.stays(len(ids)) - room) > 0:
            ids = ids[over:]  # so many fewer tokens lower what stays by at most as much
        return ids, self.stays(len(ids))


@dataclass(frozen=True)
class Reduction:
    """Tokens of a text that stay.

    Attributes:
        kept: Their indices [K] (int64), rising.
        tokens: Tokens T of the text.
        budget: Tokens that were to stay.
    """

    kept: Ints
    tokens: int
    budget: int

    @property
    def token_reduction(self) -> float:
        """Realised token reduction (T - K) / T; 0 for an empty text."""
        return (self.tokens - len(self.kept)) / self.tokens if self.tokens else 0.0

    @property
    def shortfall(self) -> int:
        """Tokens that stay beyond the budget: protected ones, or a published form's own number."""
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
        EvaluationError: If the budget is out of range, or the choice is not rising, empty, not of
            the budget's size although the reducer is exact, or lacks a protected token.
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
        return Reduction(np.arange(tokens), tokens, budget)
    chosen = reducer.keep(text, wanted)
    _check_choice(chosen, text, wanted if reducer.exact else None, type(reducer).__name__)
    return Reduction(chosen, tokens, budget)


def _check_choice(chosen: Ints, text: Text, wanted: int | None, name: str) -> None:
    """Refuse indices that are not ``wanted`` ones of a text, in order, protected ones included."""
    bounded = np.concatenate([[-1], chosen, [len(text.ids)]])
    wrong = len(chosen) == 0 if wanted is None else len(chosen) != wanted
    if wrong or bool((np.diff(bounded) < 1).any()):
        raise EvaluationError(
            f"a token reducer must keep {wanted or 'some'} of {len(text.ids)} tokens, in order",
            chosen.tolist(),
            f"{name}.keep breaks the protocol.",
        )
    if lost := set(np.flatnonzero(text.protected).tolist()).difference(chosen.tolist()):
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
