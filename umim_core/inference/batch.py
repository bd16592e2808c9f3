"""Rows that run together: they join and leave between two forwards, and each ends on its own.

    step      1     2     3     4     5
    row a     p a1  a2    a3    -           p: prefill, on its own
    row b           p b1  b2    b3    b4
    row c                       p c1  c2    takes the memory that a has left

A row's tokens do not depend on the others: it has its own rules, choice of tokens and stopping, and
in the forward the batch has only one unit of it. A change of rows copies their columns once. Of
rows that joined together those that ended are fed, too, and gain nothing, until all have or they
are taken out. The forwards are those of a reader, the engine's or a cache policy's.

Shapes: B rows, P rows of a request that are present, V vocabulary.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Final, Generic, Protocol, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umim_core.backbone.backbone import Backbone
from umim_core.errors import ContextLengthError, GenerationError, NumericalError, require
from umim_core.inference.choice import Stopper, TokenChooser
from umim_core.inference.options import GenerateOptions
from umim_core.inference.outputs import Forward, Generation, GenerationState, Row, Timings
from umim_core.inference.prefix_store import PrefixStore
from umim_core.inference.row_eviction import RowEviction
from umim_core.inference.unit_cache import UnitCache
from umim_core.merging.likelihood import widened
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.packing import PackedUnits, Segmentation, pack_rows
from umim_core.rules.matcher import Advance, Matcher, PromptIds, SuffixMatcher
from umim_core.text.token_ids import Ints, id_array

T = TypeVar("T")
TokenPrompt = NDArray[np.integer] | Sequence[int] | PromptIds
NO_RULES: Final = np.zeros(1, dtype=np.uint64)
NO_RULES.setflags(write=False)  # as tables of rules: another type would be compiled again


@dataclass(frozen=True)
class Prompts:
    """The rows of a request, before samples are split off: raw ids [T_b] and their units."""

    ids: list[Ints]
    cuts: list[Segmentation]
    device: torch.device

    @cached_property
    def packed(self) -> PackedUnits:
        return pack_rows(self.ids, self.cuts, self.device)

    def behind(self, tokens: int, units: int) -> Prompts:
        starts, lengths = self.cuts[0]
        cut = starts[units:] - tokens, lengths[units:]
        return Prompts([self.ids[0][tokens:]], [cut], self.device)


def read_prompts(
    prompts: Sequence[TokenPrompt], unfed: Sequence[int] | None, merged_model: MergedModel
) -> Prompts:
    """Check prompts and cut them into units.

    What an earlier turn chose last and never fed comes first, one id per row; no rule begins with
    it.
    """
    if len(prompts) == 0:
        raise GenerationError("there must be at least one prompt", 0, "Pass one.")
    vocabulary, new, cuts = merged_model.backbone.vocab_size, list[Ints](), list[Segmentation]()
    for b, prompt in enumerate(prompts):
        ids, parts = (prompt.ids, prompt.parts) if isinstance(prompt, PromptIds) else (prompt, None)
        new.append(id_array(ids, vocabulary, f"prompt {b}: "))
        cuts.append(merged_model.segment_prompt(new[b], parts))
    bare = [b for b, ids in enumerate(new) if not len(ids) and unfed is None]
    rule = "a prompt must hold at least one token id"
    found = f"prompt {', '.join(map(str, bare))}, which is empty"
    require(not bare, GenerationError, rule, found, "Write something, or put a BOS token into it.")
    if unfed is not None:
        new = [np.concatenate([[last], ids]) for last, ids in zip(unfed, new, strict=True)]
        cuts = [(np.append(0, starts + 1), np.append(1, lengths)) for starts, lengths in cuts]
    return Prompts(new, cuts, merged_model.backbone.device)


def positions_taken(held: int, new_tokens: int) -> int:
    """Return the positions of a prompt and of its new tokens, of which the last is never fed."""
    return held + new_tokens - 1


def check_room(backbone: Backbone, positions: int, new_tokens: int) -> None:
    held = positions - positions_taken(0, new_tokens)
    found = f"{held} prompt positions + {new_tokens} new tokens"
    remedy = "Shorten the prompt, or lower max_new_tokens."
    what = "prompt and new tokens"
    backbone.check_positions(what, positions, ContextLengthError, remedy, found)


class Columns(Protocol):
    """What forwards wrote for rows that lie side by side."""

    @property
    def lengths(self) -> Tensor:
        """Columns of each row [B] (int64, CPU)."""

    def drop(self, columns: Sequence[Sequence[int]]) -> None:
        """Drop columns of raw tokens of each row, by place; rising."""


C = TypeVar("C", bound=Columns)


class Reader(Protocol[C]):
    """The forwards that a batch runs on."""

    merged_model: MergedModel

    def matcher(self, options: GenerateOptions) -> Matcher | None:
        """Return the matcher of generated tokens; None where they stay raw."""

    def begin(
        self,
        prompts: Prompts,
        options: GenerateOptions,
        past: GenerationState | None,
        several: bool,
    ) -> tuple[C, Tensor]:
        """Read prompts: columns, in rows side by side for each sample, and logits [B, V].

        There is room for the new tokens, 1 by default; several rows may run together.
        """

    def feed(self, step: Advance, tokens: Ints, columns: C, positions: Tensor | None) -> Tensor:
        """Roll back, feed one unit per row, return the next logits [B, V].

        The newest tokens [B] of ended rows mean nothing. Positions [B, 1] are those of the newest
        tokens; None where they are columns.
        """

    def gathered(self, places: Sequence[tuple[C, int]]) -> C:
        """Return columns with copies of rows of others."""


@dataclass(eq=False)
class _Request(Generic[C]):
    """Rows that joined together, and what chooses their tokens.

    ``places`` are the columns of the rows that are present, by number, and their row there; logits
    [P, V] are of those, too.
    """

    options: GenerateOptions
    rows: list[Row]
    places: dict[int, tuple[C, int]]
    suffixes: SuffixMatcher
    chooser: TokenChooser
    stopper: Stopper
    evictions: list[RowEviction]
    logits: Tensor

    @property
    def present(self) -> list[Row]:
        return [self.rows[number] for number in self.places]

    @property
    def _running(self) -> list[bool]:
        return [row.running and number in self.places for number, row in enumerate(self.rows)]

    def advance(self) -> Advance:
        """Cut the tokens chosen last into units."""
        tokens = np.array([row.raw[-1] for row in self.rows], dtype=np.int64)
        running = np.array(self._running)
        for eviction, token, runs in zip(self.evictions, tokens, running, strict=False):
            if runs:
                eviction.push(token)
        step, present = self.suffixes.advance(tokens, running), list(self.places)
        units = zip(self.rows, step.rollback.tolist(), step.lengths.tolist(), strict=True)
        for row, rollback, length in units:
            if length:  # else it has ended
                del row.unit_lengths[len(row.unit_lengths) - rollback :]
                row.unit_lengths.append(length)
        return Advance(step.rollback[present], step.spans[present], step.lengths[present])

    def take_old(self) -> list[list[int]]:
        """Return the columns that span eviction drops of each row that is present."""
        old = [self.evictions[n].take_old() if self.evictions else [] for n in self.places]
        for row, columns in zip(self.present, old, strict=True):
            row.dropped += len(columns)
        return old

    def note(self, logits: Tensor, lengths: Tensor) -> None:
        """Note what a forward gave the rows that are present: logits [P, V], columns [P]."""
        self.logits, rows = logits, self.present
        for row, length in zip(rows, lengths.tolist(), strict=True):
            if row.running:
                row.cache_lengths.append(length)
        if self.options.observer is not None:
            generated = tuple(row.ids for row in rows)
            running = tuple(row.running for row in rows)
            self.options.observer(Forward(logits, lengths.clone(), generated, running))

    def choose(self) -> None:
        """Give every row that runs its next token, and end rows."""
        logits, running = self.logits, self._running
        if len(self.places) < len(self.rows):
            logits = logits.new_zeros(len(self.rows), logits.shape[1])
            logits[list(self.places)] = self.logits
        try:
            tokens = self.chooser.choose(logits, [row.raw for row in self.rows], running)
            if self.options.logprobs is not None:
                self._record(logits, tokens, running, self.options.logprobs)
            for number, (row, token) in enumerate(zip(self.rows, tokens, strict=True)):
                if running[number]:
                    row.raw.append(token)
                    row.stop_reason = self.stopper.reason(row.raw, row.generated, number)
        except (GenerationError, NumericalError) as error:
            for row in self.rows:
                if row.running:
                    row.error = error

    def _record(
        self, logits: Tensor, tokens: Sequence[int], running: Sequence[bool], top: int
    ) -> None:
        scores = widened(logits).log_softmax(dim=-1)  # the model's own, before any processor
        ids_chosen = torch.tensor(tokens, device=scores.device)[:, None]
        chosen = scores.gather(1, ids_chosen)[:, 0].tolist()
        best = scores.topk(top, dim=-1)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        for row, value, (ids, values), runs in zip(self.rows, chosen, pairs, running, strict=True):
            if runs and row.logprobs is not None and row.top_logprobs is not None:
                row.logprobs.append(value)
                row.top_logprobs.append(tuple(zip(ids, values, strict=True)))


class Batch(Generic[C]):
    """Rows that run together; for one thread.

    With a store, which is for an engine, others may join, and the columns of rows that leave are
    kept for prompts that begin alike.
    """

    def __init__(self, reader: Reader[C], store: PrefixStore | None = None) -> None:
        self._reader, self._store = reader, store
        self._requests: list[_Request[C]] = []

    @property
    def rows(self) -> list[Row]:
        return [row for request in self._requests for row in request.present]

    def _most_new_tokens(self, prompts: Prompts) -> int:
        """Return how many tokens the backbone has room for behind prompts; below 1 for none."""
        model, packed = self._reader.merged_model, prompts.packed
        preserved = model.unit_positions == "preserved"
        held = packed.raw_counts if preserved else packed.unit_counts
        most = min(model.backbone.limits, default=sys.maxsize)
        return most - positions_taken(int(held.max()), 0)

    @torch.no_grad()
    def join(
        self,
        prompts: Sequence[TokenPrompt],
        options: GenerateOptions,
        past: GenerationState | None = None,
        *,
        shorten: bool = False,
    ) -> list[Row]:
        """Read prompts and add their rows, the samples of a prompt side by side.

        Fewer new tokens will do with ``shorten`` where the backbone has no room for all; it is not
        for what continues a past, which ``run`` has checked.
        """
        model = self._reader.merged_model
        config, samples = options.check(model, len(prompts)), options.samples
        new = config.max_new_tokens or 0
        unfed = None if past is None else past.unfed
        read = read_prompts(prompts, unfed, options.reading(model))
        if shorten:
            new = max(1, min(new, self._most_new_tokens(read)))
            options = replace(options, max_new_tokens=new)
            config = options.settings
        before = [()] * len(prompts) if past is None else past.fed_ids
        rows = [
            Row([*fed, *ids.tolist()], len(fed), len(ids), cut)
            for fed, ids, cut in zip(before, read.ids, read.cuts, strict=True)
            for _ in range(samples)
        ]
        if options.logprobs is not None:
            for row in rows:
                row.logprobs, row.top_logprobs = [], []
        matcher = self._reader.matcher(options)
        suffixes = (
            SuffixMatcher(NO_RULES, len(rows)) if matcher is None else matcher.suffixes(len(rows))
        )
        chooser = TokenChooser(
            config,
            [len(row.raw) for row in rows],
            options.seed,
            options.logits_processor,
            past_lengths=[row.past for row in rows],
            streams=options.streams,
            device=model.backbone.device,
        )
        stopper = Stopper(config, model.backbone.tokenizer, options.stopping_criteria)
        evictions = list[RowEviction]()
        if options.span_eviction is not None:
            rule = "span eviction needs a cache of its own from the first prompt on"
            remedy = "Pass the whole text as the prompt, or leave span_eviction out."
            require(past is None, GenerationError, rule, "past", remedy)
            make = partial(RowEviction, model.require_matcher(), options.span_eviction)
            evictions = [make(row.prompt_ids) for row in rows]
        if self._store is not None and len(prompts) == 1 and past is None:
            kept = self._store.find(read.ids[0], read.cuts[0][0])
            if kept is not None:
                held = int(kept.lengths[0])
                tokens = int(read.cuts[0][0][held])
                ids = tuple(read.ids[0][:tokens].tolist())
                past = GenerationState((ids,), kept, model, True, shared=False)
                read = read.behind(tokens, held)
                for row in rows:
                    row.reused = held
        several = self._store is not None or len(rows) > 1
        columns, logits = self._reader.begin(read, options, past, several)
        places = {number: (columns, number) for number in range(len(rows))}
        request = _Request(options, rows, places, suffixes, chooser, stopper, evictions, logits)
        self._note([request], columns, logits)
        self._requests.append(request)
        return rows

    @torch.no_grad()
    def step(self) -> list[Row]:
        """Feed the tokens chosen last, then choose one for every row that runs.

        Those that ended or failed are returned, too; once all of a request have, they leave.
        """
        begun = [
            request for request in self._requests if any(row.generated for row in request.rows)
        ]
        if begun:
            self._feed(begun)
        stepped = self.rows
        for request in list(self._requests):
            request.choose()
            if not any(row.running for row in request.present):
                self.leave(request.present)
        return stepped

    def run(
        self,
        prompts: Sequence[TokenPrompt],
        options: GenerateOptions,
        past: GenerationState | None = None,
    ) -> Generator[list[Row], None, Generation]:
        """Generate token by token.

        Args:
            prompts: Raw ids per row [T_b], of any lengths, at least one token each, with the parts
                that may merge where that is not all (``PromptIds``). With ``past`` only what is
                added to it.
            options: Settings are taken as they are given; none comes from the model.
            past: The state of an earlier output, or a prefix of all prompts; it is not read again.

        Yields:
            The rows after every token.
        """
        model = self._reader.merged_model
        past = past and past.for_turn(len(prompts), model)
        seconds, began = list[float](), time.perf_counter()
        rows = self.join(prompts, options, past)
        columns = self._together(self._requests)
        while self._requests:
            self.step()
            for row in rows:
                if row.error is not None:
                    raise row.error
            seconds.append(time.perf_counter() - began)
            yield rows
            began = time.perf_counter()
        # Of a cache policy nothing goes on: its columns are of another type.
        cache = cast("UnitCache", columns)
        state = GenerationState(tuple(tuple(row.raw) for row in rows), cache, model)
        if options.span_eviction is not None:
            state.release()  # its positions are not known without the columns that went
        timings = Timings(seconds[0], sum(seconds[1:]))
        return Generation(tuple(rows), timings, state, options)

    def leave(self, rows: Sequence[Row]) -> None:
        """Take rows out, whether they have ended or not; their columns go to the store."""
        for request in list(self._requests):
            present = list(request.places)
            gone = [n for n in present if any(request.rows[n] is row for row in rows)]
            if not gone:
                continue
            for number in gone:
                row, place = request.rows[number], request.places.pop(number)
                is_whole = not request.evictions and row.error is None and not row.past
                if self._store is not None and is_whole:
                    self._store.put(*row.held(), cast("tuple[UnitCache, int]", place))
            stay = [at for at, number in enumerate(present) if number in request.places]
            request.logits = request.logits[stay]
            if not stay:
                self._requests.remove(request)

    def forget(self) -> None:
        """Free the columns that are kept for later prompts."""
        if self._store is not None:
            self._store.clear()

    def drop(self) -> None:
        """Take all rows out and keep no columns, those of earlier rows neither."""
        self._requests.clear()
        self.forget()

    def _feed(self, requests: Sequence[_Request[C]]) -> None:
        rows = [(request, row) for request in requests for row in request.present]
        columns = self._together(requests)
        steps = [request.advance() for request in requests]
        step = Advance(
            np.concatenate([part.rollback for part in steps]),
            np.concatenate([part.spans for part in steps]),
            np.concatenate([part.lengths for part in steps]),
        )
        tokens = np.array([row.raw[-1] for _, row in rows], dtype=np.int64)
        positions, model = None, self._reader.merged_model
        preserved = model.unit_positions == "preserved"
        if preserved or any(request.evictions for request in requests):
            held = (columns.lengths.numpy() - step.rollback).tolist()
            newest = [
                len(row.raw) - 1 if preserved or request.evictions else length
                for (request, row), length in zip(rows, held, strict=True)
            ]
            positions = torch.tensor(newest, device=model.backbone.device)[:, None]
        self._note(requests, columns, self._reader.feed(step, tokens, columns, positions))

    def _note(self, requests: Sequence[_Request[C]], columns: C, logits: Tensor) -> None:
        """Drop the columns of old spans after a forward; hand logits [B, V] to their requests."""
        if any(request.evictions for request in requests):
            columns.drop([old for request in requests for old in request.take_old()])
        lengths, first = columns.lengths, 0
        for request in requests:
            part = slice(first, first + len(request.places))
            request.note(logits[part], lengths[part])
            first = part.stop

    def _together(self, requests: Sequence[_Request[C]]) -> C:
        """Return columns of exactly the rows of some requests, in order."""
        places = [place for request in requests for place in request.places.values()]
        columns = places[0][0]
        if [(id(held), row) for held, row in places] != [
            (id(columns), row) for row in range(len(columns.lengths))
        ]:
            columns, at = self._reader.gathered(places), 0
            for request in requests:
                for number in request.places:
                    request.places[number] = columns, at
                    at += 1
        return columns


def exhaust(steps: Generator[object, None, T]) -> T:
    """Take all steps and return what they end with."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            output: T = end.value
            return output
