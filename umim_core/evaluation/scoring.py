"""Log-likelihoods of (context, continuation) requests over a compressed model, in batches.

    merge    what is matched        continuation tokens
    prompt   the context alone      raw; requests with one context share its row of a forward
    all      context + continuation each scored in the state that decoding passes through

Inputs that are too long lose leading units of the context, never part of one: matching from a unit
border on gives the same units as matching the whole. How many depends on the context and on the
length of the continuation alone: were its tokens looked at, probabilities would not add up to 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from umim_core.backbone.attention_masks import attention_window
from umim_core.config.form import Merge, check_merge
from umim_core.errors import EvaluationError
from umim_core.merging.continuations import score_continuations, widest_row
from umim_core.merging.likelihood import TokenScores, finite_sum, score_rows
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Parts, parts_behind
from umim_core.text.token_ids import Ints


@dataclass(frozen=True)
class Asked:
    """Question and cue of a context, word for word as they stand in it."""

    question: str = ""
    cue: str = ""


UNKNOWN: Final = Asked()


@dataclass(frozen=True)
class Request:
    """A continuation to score after a context, raw ids of at least one token each [T] and [n].

    ``parts`` are the tokens of the context that may merge; None for all.
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
    """Size of a model's input in raw tokens, and in the units that it reads in their place.

    ``tokens`` and ``units`` are of context and continuation, or of prompt and generated text;
    ``context_tokens`` and ``context_units`` of the context alone, 0 where it is not matched alone.

    Attributes:
        columns: Columns of a layer's KV cache that stayed of the context; None if none is dropped.
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

    def reductions(self) -> dict[str, float | None]:
        """Return the reductions by name, those of baselines where there are some."""
        found = {
            "token_reduction": self.token_reduction,
            "context_token_reduction": self.context_token_reduction,
        }
        if self.shortfall:
            found["shortfall"] = self.shortfall_share
        if self.columns is not None:
            found["cache_reduction"] = self.cache_reduction
        return found

    @property
    def shortfall_share(self) -> float:
        """Token reduction that is missing to what was asked for; 0 of nothing."""
        return self.shortfall / self.context_tokens if self.context_tokens else 0.0


@dataclass(frozen=True)
class Likelihood:
    """Log-probability of a request's continuation (nats), whether greedy decoding gives it."""

    log_prob: float
    greedy: bool
    sizes: Sizes


def counted_sizes(asked: Sequence[tuple[bool, Sizes]]) -> list[Sizes]:
    """Return the sizes of a question's requests that count, given whether each has a context.

    A text scored without context next to answers, as ``acc_seq`` needs it, has nothing to merge.
    """
    return [size for context, size in asked if context] or [size for _, size in asked]


@dataclass
class RequestScorer(ABC):
    """Scores requests and counts what went in; a subclass says how contexts are shortened."""

    total: Sizes = field(default_factory=Sizes, kw_only=True)

    @torch.no_grad()
    def score(
        self,
        requests: Sequence[Request],
        batch_size: int,
        progress: Callable[[int], object] = lambda done: None,
    ) -> list[Likelihood]:
        """Score requests, in their order; results do not depend on ``batch_size``.

        ``progress`` is called with the number of requests that each forward has scored.
        """
        _check_requests(requests, batch_size)
        results: dict[int, Likelihood] = {}
        for done in self.forwards(requests, batch_size):
            self.total = sum((score.sizes for score in done.values()), self.total)
            results |= done
            progress(len(done))
        return [results[number] for number in range(len(requests))]

    @abstractmethod
    def forwards(
        self, requests: Sequence[Request], batch_size: int
    ) -> Iterator[dict[int, Likelihood]]:
        """Yield the scores of every forward, by number of their request."""


def _check_requests(requests: Sequence[Request], batch_size: int) -> None:
    if batch_size < 1:
        raise EvaluationError("batch_size must be at least 1", batch_size, "Use 1 or more.")
    for i, request in enumerate(requests):
        if len(request.context) == 0 or len(request.continuation) == 0:
            raise EvaluationError(
                "a context and its continuation must hold at least one token",
                f"request {i}: {len(request.context)} and {len(request.continuation)} tokens",
                "Put the BOS token into an empty context and drop empty continuations.",
            )


@dataclass(frozen=True)
class _Row:
    context: Ints
    parts: Parts | None
    members: list[int]
    sizes: list[Sizes]
    columns: int


@dataclass
class Scorer(RequestScorer):
    """Score requests with a merge module and its rules, longest first."""

    merged_model: MergedModel
    merge: Merge
    max_units: int

    def __post_init__(self) -> None:
        check_merge(self.merge, ("prompt", "all"))

    def forwards(
        self, requests: Sequence[Request], batch_size: int
    ) -> Iterator[dict[int, Likelihood]]:
        if self.merge == "all" and self.merged_model.raw_tail:
            raise EvaluationError(
                "raw_tail needs contexts that are matched alone", "merge 'all'", "Use 'prompt'."
            )
        alone = self.merge == "prompt"
        rows = self._context_rows if alone else self._whole_rows
        ordered = sorted(rows(requests, batch_size), key=lambda row: -row.columns)
        window = attention_window(self.merged_model.backbone.model.config)
        for batch in _batches(ordered, batch_size, window):
            members = [row.members for row in batch]
            scores = (self._score_contexts if alone else self._score_whole)(
                batch, [[requests[i].continuation for i in row] for row in members]
            )
            numbers = [i for row in members for i in row]
            sizes = [size for row in batch for size in row.sizes]
            yield {
                number: Likelihood(finite_sum(score.log_probs), bool(score.greedy.all()), size)
                for number, score, size in zip(numbers, scores, sizes, strict=True)
            }

    def fit(self, ids: Ints, room: int, parts: Parts | None = None) -> tuple[Ints, int]:
        """Match ids [T], drop leading units beyond ``room``; return the ids left and their units.

        ``parts`` are the tokens that may merge; None for all.
        """
        starts, _ = self.merged_model.segment_prompt(ids, parts)
        needed = self._counted(starts, len(ids), len(starts))
        dropped = int((needed > room).sum())
        if dropped and dropped == len(starts):
            raise EvaluationError(
                f"context and continuation must fit {self.max_units} units",
                f"{room - 1} units left for the context",
                "Shorten the continuation, or use a backbone with more positions.",
            )
        # Not every baseline cuts what is left as it cut the whole.
        if not dropped:
            return ids, len(starts)
        first = int(starts[dropped])
        return self.fit(ids[first:], room, parts_behind(parts, first))

    def _counted(self, starts: Ints, raw: int, units: int) -> Ints:
        """Return how many positions are in use [S] when a sequence begins at each of its units."""
        compact = self.merged_model.unit_positions == "compact"
        return units - np.arange(len(starts)) if compact else raw - starts

    def _context_rows(self, requests: Sequence[Request], batch_size: int) -> Iterator[_Row]:
        """Group requests by context; a row takes no more continuations than pay off."""
        groups: dict[tuple[bytes, Parts | None], list[int]] = {}
        fitted: dict[tuple[bytes, Parts | None], tuple[Ints, int]] = {}
        for i, request in enumerate(requests):
            room = self.max_units - len(request.continuation) + 1
            context, units = self.fit(request.context, room, request.parts)
            key = context.tobytes(), request.parts_of_last(len(context))
            groups.setdefault(key, []).append(i)
            fitted[key] = (context, units)
        for key, members in groups.items():
            context, units = fitted[key]
            sizes = [len(requests[i].continuation) - 1 for i in members]
            backbone = self.merged_model.backbone
            room = widest_row(units, backbone)
            for part in _parts(sizes, batch_size, units, backbone.hidden_size, room):
                columns = units + sum(sizes[k] for k in part)
                counted = [
                    Sizes(len(context) + sizes[k] + 1, units + sizes[k] + 1, len(context), units)
                    for k in part
                ]
                yield _Row(context, key[1], [members[k] for k in part], counted, columns)

    def _score_contexts(
        self, rows: Sequence[_Row], endings: Sequence[Sequence[Ints]]
    ) -> list[TokenScores]:
        contexts, parts = [row.context for row in rows], [row.parts for row in rows]
        scored = score_continuations(contexts, endings, self.merged_model, parts)
        return [score for row in scored for score in row]

    def _whole_rows(self, requests: Sequence[Request], batch_size: int) -> Iterator[_Row]:
        """Cut contexts as if continuations stayed raw: by their lengths, never by their tokens."""
        for i, request in enumerate(requests):
            context, inputs = request.context, len(request.continuation) - 1
            starts, lengths = self.merged_model.segment(context, request.parts)
            # The raw prefix of a span goes on from the span's position.
            tops = np.arange(len(starts)) + np.maximum(lengths - 2, 0)
            highest = max(int(tops.max(initial=0)) + 1, len(starts) + inputs)
            needed = self._counted(starts, len(context) + inputs, highest)
            context_left = context[
                np.append(starts, len(context))[int((needed > self.max_units).sum())] :
            ]
            if len(context_left) == 0:
                raise EvaluationError(
                    f"a continuation must fit {self.max_units} units with context",
                    f"{inputs + 1} tokens",
                    "Shorten the continuation, or use a backbone with more positions.",
                )
            whole = np.concatenate([context_left, request.continuation])
            parts = request.parts_of_last(len(context_left))
            if parts is not None:
                parts = (*parts, (len(context_left), len(whole)))
            size = Sizes(len(whole), len(self.merged_model.segment(whole, parts)[0]))
            yield _Row(context_left, parts, [i], [size], len(whole))

    def _score_whole(
        self, rows: Sequence[_Row], endings: Sequence[Sequence[Ints]]
    ) -> list[TokenScores]:
        whole = [np.concatenate([row.context, *e]) for row, e in zip(rows, endings, strict=True)]
        known = [len(row.context) for row in rows]
        return score_rows(whole, self.merged_model, known, parts=[row.parts for row in rows])


def _parts(
    sizes: Sequence[int], most: int, units: int, width: int, room: int
) -> Iterator[list[int]]:
    """Cut the indices of ``sizes`` into runs of at most ``most`` members that pay off as one row.

    ::

        cost of a row of L columns     L + L^2 / K     K = 6 d: a column costs 24 d^2 operations in
                                                       the products of a block, 4 L d in attention
        joining n columns to S + m     costs     n + (2 (S + m) n + n^2) / K
        a row of its own               costs S + n + (S + n)^2 / K

    The first is the smaller one where 2 m n <= S (S + K).
    """
    part: list[int] = []
    total = 0
    for k, size in enumerate(sizes):
        dear = 2 * total * size > units * (units + 6 * width)
        if part and (len(part) == most or dear or units + total + size > room):
            yield part
            part, total = [], 0
        part.append(k)
        total += size
    if part:
        yield part


def _batches(rows: Sequence[_Row], most: int, window: int | None) -> Iterator[list[_Row]]:
    """Cut rows, longest first, into batches of at most ``most`` requests; no row is split.

    Rows beyond an attention window need the backbone's own mask, so no row of several
    continuations, which brings another, joins them.
    """
    batch: list[_Row] = []
    total = 0
    for row in rows:
        full = total + len(row.members) > most
        if batch and (full or (window is not None and row.columns <= window < batch[0].columns)):
            yield batch
            batch, total = [], 0
        batch.append(row)
        total += len(row.members)
    if batch:
        yield batch
