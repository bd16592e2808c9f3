"""Scored requests: a continuation after a context, its log-likelihood, its tokens and units."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from umim_core.errors import EvaluationError
from umim_core.rules.matcher import Parts, parts_behind

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Asked:
    """Question and cue of a context, word for word as they stand in it."""

    question: str = ""
    cue: str = ""


UNKNOWN: Final = Asked()


@dataclass(frozen=True)
class Request:
    """A continuation to score after a context.

    Attributes:
        context: Raw ids [T], at least one.
        continuation: Raw ids [n], at least one.
        asked: What the context asks.
        parts: Tokens of the context that may merge; None for all.
    """

    context: Ints
    continuation: Ints
    asked: Asked = UNKNOWN
    parts: Parts | None = None

    def parts_of_last(self, tokens: int) -> Parts | None:
        """Return which of the context's last tokens may merge; None for all."""
        return parts_behind(self.parts, len(self.context) - tokens)


@dataclass(frozen=True)
class Sizes:
    """Size of a model's input in raw tokens, and in units once it is merged.

    Attributes:
        tokens: Raw tokens of context and continuation, or of prompt and generated text.
        units: What the model reads in their place.
        context_tokens: Raw tokens of the context or prompt; 0 where it is not matched alone.
        context_units: What the model reads in their place.
        columns: Columns of a layer's KV cache that stayed of the context; None where none is
            dropped.
        shortfall: Tokens or columns that stayed of the context beyond a baseline's budget, because
            they are protected or the method drops no more.
    """

    tokens: int = 0
    units: int = 0
    context_tokens: int = 0
    context_units: int = 0
    columns: int | None = None
    shortfall: int = 0

    def __add__(self, other: Sizes) -> Sizes:
        """Return the size of two inputs together."""
        columns = [size.columns for size in (self, other) if size.columns is not None]
        return Sizes(
            self.tokens + other.tokens,
            self.units + other.units,
            self.context_tokens + other.context_tokens,
            self.context_units + other.context_units,
            sum(columns) if columns else None,
            self.shortfall + other.shortfall,
        )

    @property
    def token_reduction(self) -> float:
        """(raw tokens - units) / raw tokens; 0 of nothing."""
        return (self.tokens - self.units) / self.tokens if self.tokens else 0.0

    @property
    def context_token_reduction(self) -> float | None:
        """(raw tokens - units) / raw tokens of the context; None where it is not matched alone."""
        saved = self.context_tokens - self.context_units
        return saved / self.context_tokens if self.context_tokens else None

    @property
    def cache_reduction(self) -> float | None:
        """Share of the context that the KV cache does not hold; None as above."""
        if self.columns is None or not self.context_tokens:
            return self.context_token_reduction
        return (self.context_tokens - self.columns) / self.context_tokens

    @property
    def shortfall_share(self) -> float:
        """Token reduction that is missing to what was asked for; 0 of nothing."""
        return self.shortfall / self.context_tokens if self.context_tokens else 0.0


@dataclass(frozen=True)
class Likelihood:
    """Score of a request.

    Attributes:
        log_prob: Sum of the continuation's log-probabilities (nats).
        greedy: Whether greedy decoding gives the continuation.
        sizes: Tokens and units that went in.
    """

    log_prob: float
    greedy: bool
    sizes: Sizes


Finished = Callable[[Mapping[int, Likelihood]], object]
"""Takes the scores that a forward finished, by number of their request."""


def ignore_finished(_: Mapping[int, Likelihood]) -> None:
    """Do nothing with the scores of a forward: they come again when all are there."""


def counted_sizes(asked: Sequence[tuple[str, Sizes | None]]) -> list[Sizes]:
    """Return the sizes of a question's requests that its token reduction counts.

    A text scored without context next to answers, as ``acc_seq`` needs it, has nothing to merge.

    Args:
        asked: Context and size of each request of one question; None where no size is known.
    """
    counted = [size for context, size in asked if context] or [size for _, size in asked]
    return [size for size in counted if size is not None]


@dataclass
class RequestScorer(ABC):
    """Scores requests and counts what went in; a subclass says how contexts are shortened.

    Attributes:
        total: Sizes of all requests so far; ``columns`` is None where none is dropped.
    """

    total: Sizes = field(default_factory=Sizes, kw_only=True)

    @torch.no_grad()
    def score(
        self,
        requests: Sequence[Request],
        batch_size: int,
        finished: Finished = ignore_finished,
    ) -> list[Likelihood]:
        """Score requests.

        Returns:
            One likelihood per request, in order. They do not depend on ``batch_size``.

        Raises:
            EvaluationError: If the batch size is below 1, a context or a continuation is empty, a
                continuation leaves no room for its context, or merge ``all`` has a raw tail.
            NumericalError: If a log-probability is NaN or infinite.
        """
        _check_requests(requests, batch_size)
        results: dict[int, Likelihood] = {}
        for done in self.forwards(requests, batch_size):
            self.total = sum((score.sizes for score in done.values()), self.total)
            results |= done
            finished(done)
        return [results[number] for number in range(len(requests))]

    @abstractmethod
    def forwards(
        self, requests: Sequence[Request], batch_size: int
    ) -> Iterator[dict[int, Likelihood]]:
        """Yield the scores of every forward, by number of their request."""


def _check_requests(requests: Sequence[Request], batch_size: int) -> None:
    """Refuse what cannot be scored."""
    if batch_size < 1:
        raise EvaluationError("batch_size must be at least 1", batch_size, "Use 1 or more.")
    for i, request in enumerate(requests):
        if len(request.context) == 0 or len(request.continuation) == 0:
            raise EvaluationError(
                "a context and its continuation must hold at least one token",
                f"request {i}: {len(request.context)} and {len(request.continuation)} tokens",
                "Put the BOS token into an empty context and drop empty continuations.",
            )
