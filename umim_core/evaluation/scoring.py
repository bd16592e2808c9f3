"""Log-likelihoods of (context, continuation) requests over compressed inputs, in batches.

    merge    what is matched        continuation tokens
    prompt   the context alone      raw; requests with one context share its row of a forward
    all      context + continuation each scored in the state that decoding passes through

Inputs that are too long lose leading units of the context, never part of one: matching from a unit
border on gives the same units as matching the whole. How many depends on the context and on the
length of the continuation alone: were its tokens looked at, probabilities would not add up to 1.

The budget of a baseline is UMIM's own: as many tokens, or columns of the KV cache, stay of a
context as the rules leave units of it; with a target round(target * T) of its T tokens go::

    context     the cat sat on the mat      rules leave  [the cat] [sat] [on the] [mat]
    truncation              on the mat      and the token before: 4 of 6
    target 0.5              on the mat      3 of 6

The cue that ends the prompts of a task ("Answer:") stays under every token reducer. A cache
policy scores the first token of a continuation before it drops anything, as a served prompt has it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from umim_core.baselines.eviction import score_evicted
from umim_core.baselines.lexical_units import token_texts
from umim_core.baselines.methods import (
    EvictedColumns,
    MergedSpans,
    Method,
    TargetReduction,
    Text,
    TokenReducer,
    reduce_tokens,
)
from umim_core.config.form import Merge
from umim_core.errors import ConfigError, EvaluationError, require
from umim_core.evaluation.sizes import Sizes
from umim_core.merging.continuations import score_continuations, widest_row
from umim_core.merging.likelihood import TokenScores, finite_sum, score_rows
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Parts, parts_behind
from umim_core.text.token_ids import Ints

_TOO_LONG: Final = "Shorten the continuation, or use a backbone with more positions."


@dataclass(frozen=True)
class Query:
    """Question and cue of a context, word for word as they stand in it; empty where unknown."""

    question: str = ""
    cue: str = ""


UNKNOWN: Final = Query()


@dataclass(frozen=True)
class Request:
    """A continuation to score after a context, raw ids of at least one token each [T] and [n]."""

    context: Ints
    continuation: Ints
    query: Query = UNKNOWN
    parts: Parts | None = None  # tokens of the context that may merge; None for all


@dataclass(frozen=True)
class Likelihood:
    log_prob: float  # of a request's continuation, nats
    greedy: bool  # whether greedy decoding gives it
    sizes: Sizes

    @classmethod
    def of(cls, score: TokenScores, sizes: Sizes) -> Likelihood:
        return cls(finite_sum(score.log_probs), bool(score.greedy.all()), sizes)


@dataclass(frozen=True)
class _Context:
    ids: Ints  # raw ones [T], as they fit
    parts: Parts | None
    query: Query
    stays: int  # its units, or the tokens or columns that may stay of it
    members: list[int]  # numbers of the requests that share it


@dataclass
class RequestScorer(ABC):
    """Scores requests and counts what went in; a subclass says how contexts are shortened.

    ``max_units`` is the longest sequence that the model takes.
    """

    merged_model: MergedModel
    max_units: int
    total: Sizes = field(default_factory=Sizes, kw_only=True)

    def fit(self, ids: Ints, room: int, parts: Parts | None = None) -> tuple[Ints, int]:
        """Drop leading ids [T] of what leaves more than ``room`` units, tokens or columns.

        ``parts`` are the tokens that may merge; None for all. Returns the ids that are left, and
        how many units, tokens or columns stay of them.
        """
        starts, _ = self.merged_model.segment_prompt(ids, parts)
        needed = self.merged_model.positions_from(starts, len(ids), len(starts))
        dropped = int((needed > room).sum())
        if not dropped:
            return ids, len(starts)
        rule = f"context and continuation must fit {self.max_units} units"
        value = f"{room - 1} units left for the context"
        require(dropped < len(starts), EvaluationError, rule, value, _TOO_LONG)
        first = int(starts[dropped])  # not every baseline cuts what is left as it cut the whole
        return RequestScorer.fit(self, ids[first:], room, parts_behind(parts, first))

    def equal_saving(self, tokens: int, units: int) -> int:
        """Return how many of so many tokens stay at the saving of so many units."""
        return tokens - round((tokens - units) * self.merged_model.saved_share)

    @abstractmethod
    def forwards(
        self, requests: Sequence[Request], batch_size: int
    ) -> Iterator[dict[int, Likelihood]]:
        """Yield the scores of every forward, by number of their request."""

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
        results: dict[int, Likelihood] = {}
        for done in self.forwards(requests, batch_size):
            self.total = sum((score.sizes for score in done.values()), self.total)
            results |= done
            progress(len(done))
        return [results[number] for number in range(len(requests))]

    def contexts(self, requests: Sequence[Request]) -> list[_Context]:
        """Return the contexts of requests as they fit, once each: a question's answers share it."""
        found: dict[tuple[bytes, Parts | None, Query], _Context] = {}
        for number, request in enumerate(requests):
            room = self.max_units - len(request.continuation) + 1
            rule = f"a continuation must fit {self.max_units} units with a token of its context"
            value = f"{len(request.continuation)} tokens"
            require(room >= 1, EvaluationError, rule, value, _TOO_LONG)
            ids, stays = self.fit(request.context, room, request.parts)
            parts = parts_behind(request.parts, len(request.context) - len(ids))
            new = _Context(ids, parts, request.query, stays, [])
            found.setdefault((ids.tobytes(), parts, request.query), new).members.append(number)
        return list(found.values())

    def prompt(
        self, ids: Ints, room: int, query: Query, parts: Parts | None
    ) -> tuple[Ints, Parts | None, Sizes]:
        """Return a prompt as it is read, its tokens that may merge, and the size of its context."""
        fitting, _ = self.fit(ids, room, parts)
        behind = parts_behind(parts, len(ids) - len(fitting))
        return fitting, behind, Sizes(context_tokens=len(fitting))


@dataclass(frozen=True)
class _Row:
    ids: Ints
    parts: Parts | None
    members: list[int]
    sizes: list[Sizes]
    columns: int


@dataclass
class Scorer(RequestScorer):
    """Score requests with a merge module and its rules, longest first."""

    merge: Merge = "prompt"

    def forwards(
        self, requests: Sequence[Request], batch_size: int
    ) -> Iterator[dict[int, Likelihood]]:
        model, alone = self.merged_model, self.merge == "prompt"
        rows = self._context_rows(requests, batch_size) if alone else self._whole_rows(requests)
        ordered = sorted(rows, key=lambda row: -row.columns)
        window = model.backbone.window
        for batch in _batches(ordered, batch_size, window):
            contexts, parts = [row.ids for row in batch], [row.parts for row in batch]
            endings = [[requests[i].continuation for i in row.members] for row in batch]
            if alone:
                by_row = score_continuations(contexts, endings, model, parts)
                scores = [score for row in by_row for score in row]
            else:
                pairs = zip(contexts, endings, strict=True)
                whole = [np.concatenate([ids, *ending]) for ids, ending in pairs]
                scores = score_rows(whole, model, [len(ids) for ids in contexts], parts=parts)
            numbers = [number for row in batch for number in row.members]
            sizes = [size for row in batch for size in row.sizes]
            yield {
                number: Likelihood.of(score, size)
                for number, score, size in zip(numbers, scores, sizes, strict=True)
            }

    def _context_rows(self, requests: Sequence[Request], batch_size: int) -> Iterator[_Row]:
        """Group requests by context; a row takes no more continuations than pay off."""
        backbone = self.merged_model.backbone
        for context in self.contexts(requests):
            tokens, units = len(context.ids), context.stays
            fed = [len(requests[i].continuation) - 1 for i in context.members]
            room = widest_row(units, backbone)
            for part in _parts(fed, batch_size, units, backbone.hidden_size, room):
                sizes = [
                    Sizes(tokens + fed[k] + 1, units + fed[k] + 1, tokens, units) for k in part
                ]
                columns = units + sum(fed[k] for k in part)
                members = [context.members[k] for k in part]
                yield _Row(context.ids, context.parts, members, sizes, columns)

    def _whole_rows(self, requests: Sequence[Request]) -> Iterator[_Row]:
        """Cut contexts as if continuations stayed raw: by their lengths, never by their tokens."""
        for number, request in enumerate(requests):
            context, fed = request.context, len(request.continuation) - 1
            starts, lengths = self.merged_model.segment(context, request.parts)
            # The raw prefix of a span goes on from the span's position.
            tops = np.arange(len(starts)) + np.maximum(lengths - 2, 0)
            highest = max(int(tops.max(initial=0)) + 1, len(starts) + fed)
            needed = self.merged_model.positions_from(starts, len(context) + fed, highest)
            dropped = int((needed > self.max_units).sum())
            rule = f"a continuation must fit {self.max_units} units with context"
            value = f"{fed + 1} tokens"
            require(dropped < len(starts), EvaluationError, rule, value, _TOO_LONG)
            first = int(starts[dropped])
            whole = np.concatenate([context[first:], request.continuation])
            parts = parts_behind(request.parts, first)
            if parts is not None:
                parts = (*parts, (len(context) - first, len(whole)))
            size = Sizes(len(whole), len(self.merged_model.segment(whole, parts)[0]))
            yield _Row(context[first:], parts, [number], [size], len(whole))


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


@dataclass
class ReducedScorer(RequestScorer):
    """Score requests whose contexts a token reducer has cut down.

    A BOS in front, the cue and the raw tail are protected.
    """

    reducer: TokenReducer
    target: TargetReduction | None = None

    def forwards(
        self, requests: Sequence[Request], batch_size: int
    ) -> Iterator[dict[int, Likelihood]]:
        reduced: dict[int, tuple[Request, Sizes]] = {}
        for context in self.contexts(requests):
            ids, size = self.shorten(context.ids, context.stays, context.query)
            for number in context.members:
                ending = requests[number].continuation
                new = Sizes(len(ending), len(ending))
                reduced[number] = Request(ids, ending), size + new
        base = Scorer(self.merged_model.base(), self.max_units)
        ordered = [reduced[number] for number in range(len(requests))]
        for done in base.forwards([request for request, _ in ordered], batch_size):
            yield {n: replace(score, sizes=ordered[n][1]) for n, score in done.items()}

    def fit(self, ids: Ints, room: int, parts: Parts | None = None) -> tuple[Ints, int]:
        if self.target is not None:
            return self.target.fit(ids, room)
        fitting, units = super().fit(ids, room, parts)
        return fitting, min(room, self.equal_saving(len(fitting), units))

    def prompt(
        self, ids: Ints, room: int, query: Query, parts: Parts | None
    ) -> tuple[Ints, Parts | None, Sizes]:
        shortened, size = self.shorten(*self.fit(ids, room, parts), query)
        return shortened, None, size

    def shorten(self, ids: Ints, budget: int, query: Query = UNKNOWN) -> tuple[Ints, Sizes]:
        """Reduce the tokens of a context [T] to a budget of those that stay; return its sizes, too.

        The cue of the query is protected; a reducer that needs a question takes the end of the
        context where none is known.
        """
        backbone = self.merged_model.backbone
        protected = np.arange(len(ids)) >= len(ids) - self.merged_model.raw_tail
        protected[0] |= int(ids[0]) in backbone.special_ids
        if query.cue:
            protected |= _from_cue(token_texts(ids, backbone.require_tokenizer()), query.cue)
        question = backbone.encode(query.question) if query.question else []
        text = Text(ids, protected, np.array(question, dtype=np.int64))
        kept = reduce_tokens(self.reducer, text, budget)
        tokens, stayed = len(ids), len(kept)
        size = Sizes(tokens, stayed, tokens, stayed, shortfall=stayed - budget)
        return ids[kept], size


def _from_cue(texts: list[str], cue: str) -> NDArray[np.bool_]:
    """Return which tokens [T] hold the last place of a cue in their text, or stand behind it."""
    place = "".join(texts).rfind(cue.strip())
    ends = np.cumsum([len(text) for text in texts])
    return ends > place if place >= 0 else np.zeros(len(texts), dtype=bool)


@dataclass
class EvictedScorer(RequestScorer):
    """Score requests on a KV cache whose columns a policy chooses, one context after the other.

    ``target`` is the share of each context's columns that go; None for the token reduction of the
    rules.
    """

    method: EvictedColumns
    target: TargetReduction | None = None
    total: Sizes = field(default_factory=lambda: Sizes(columns=0), kw_only=True)

    def budget(self, context: Ints, generated: int = 0, parts: Parts | None = None) -> int:
        """Return how many columns may stay of a context and of generated tokens behind it.

        A target is one of all these tokens together. The rules leave the columns of the context
        that merging leaves at its saving, and generated tokens stay raw.
        """
        if self.target is not None:
            return self.target.stays(len(context) + generated)
        units = len(self.merged_model.segment_prompt(context, parts)[0])
        return self.equal_saving(len(context), units) + generated

    def fit(self, ids: Ints, room: int, parts: Parts | None = None) -> tuple[Ints, int]:
        fitting = ids[-room:]
        return fitting, self.budget(fitting, parts=parts_behind(parts, len(ids) - len(fitting)))

    def forwards(
        self, requests: Sequence[Request], batch_size: int
    ) -> Iterator[dict[int, Likelihood]]:
        backbone, method = self.merged_model.backbone, self.method
        for context in self.contexts(requests):
            ids, budget = context.ids, context.stays
            endings = [requests[number].continuation for number in context.members]
            if method.score is None:
                scores, columns = score_evicted(ids, endings, backbone, method.new_policy, budget)
            else:
                scores, columns = method.score(ids, endings, backbone, budget), budget
            yield {
                number: Likelihood.of(score, self.sizes(len(ids), len(ending), columns, budget))
                for number, ending, score in zip(context.members, endings, scores, strict=True)
            }

    def sizes(self, tokens: int, new: int, columns: int, budget: int) -> Sizes:
        """Return the sizes of a context that was read whole, and of new tokens behind it."""
        total, over = tokens + new, max(0, columns - budget)
        return Sizes(total, total, tokens, tokens, columns, over)


def method_scorer(
    method: Method, merged_model: MergedModel, max_units: int, target: TargetReduction | None = None
) -> RequestScorer:
    """Return what scores requests under a baseline, in the place of a checkpoint's module.

    ``target`` is the token reduction of each context; None for that of the checkpoint's rules.
    """
    if isinstance(method, MergedSpans):
        rule = "target_tr needs a method that drops tokens or columns"
        remedy = "Leave it out, or cut the rules: umim prune --target-tr."
        require(target is None, ConfigError, rule, "one that merges the spans of the rules", remedy)
        module = merged_model.module if method.merger is None else method.merger
        # A checkpoint's bound on damage is one on its own rules and module: the baseline has none.
        merged_model = replace(
            merged_model, module=module, matcher=method.segmenter, decode_max_damage=None
        )
        return Scorer(merged_model, max_units)
    if isinstance(method, TokenReducer):
        return ReducedScorer(merged_model, max_units, method, target)
    return EvictedScorer(merged_model, max_units, method, target)


def named_method(name: str | None, own: str | None) -> str | None:
    """Return a baseline's name, with the model of its own (name@commit) that it chooses by."""
    return name if own is None else f"{name} ({own})"
