"""Batched generation over a cache that shrinks whenever generated tokens complete a rule.

One forward per token, always, with one new unit per row::

    join    prompt ids --match--> units --prefill--> cache, logits
    step    does a rule end at y, the token chosen last, among the generated tokens?
                no   feed e(y)                    cache length + 1
                yes  roll back its earlier units,
                     feed the surrogate           cache length - rolled back + 1
            choose y by the logits; stop?

Rows join and leave between two steps::

    step      1     2     3     4     5
    row a     p a1  a2    a3    -           p: prefill, on its own
    row b           p b1  b2    b3    b4
    row c                       p c1  c2    takes the memory that a has left

``generate`` lets its rows join and steps until all have ended. A row's tokens do not depend on the
others: it has its own rules, choice of tokens and stopping, and in the forward the batch has only
one unit of it. A change of rows copies their columns once. Of rows that joined together those that
ended are fed, too, and gain nothing, until all have or they are taken out.

Prompts merge by all rules, y by those within the bound on prices. With ``span_eviction`` nothing is
merged, and the columns of old spans go (``row_eviction``).

The last token of a row is never fed: nothing follows it, unless another turn continues the state.
Samples of one prompt share its prefill.

At a merge depth k above 0 a token passes the first k layers as it is. Then its unit is made of its
state and those of the span's earlier tokens, three of which are kept per row (``unit_cache``); only
the other layers are rolled back. It stays one forward per token.

Positions are contiguous over units (``compact``, the paper's) or those of the units' last raw
tokens (``preserved``), as the module was trained.

Shapes: B rows, S prompt units of the longest row, W units per forward, d embedding size, V
vocabulary.
Source: paper, "Inference with UMIM".
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from umim_core.backbone.attention_masks import attention_window, check_attention_window
from umim_core.errors import GenerationError, NumericalError
from umim_core.inference.choice import Stopper, TokenChooser, log_probs
from umim_core.inference.options import GenerateOptions
from umim_core.inference.outputs import (
    Forward,
    GeneratedUnits,
    Generation,
    GenerationState,
    Prefix,
    Row,
    Timings,
    merged_spans,
)
from umim_core.inference.prefix_store import PrefixStore, SharedPrefix
from umim_core.inference.prompts import (
    Prompts,
    TokenPrompt,
    check_room,
    cut_left,
    positions_taken,
    read_prompts,
)
from umim_core.inference.row_eviction import RowEviction
from umim_core.inference.unit_cache import UnitCache, UnitInputs
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Advance, Matcher
from umim_core.rules.pruning import rules_under
from umim_core.text.token_ids import Ints

T = TypeVar("T")


def exhaust(steps: Generator[None, None, T]) -> T:
    """Take all steps and return what they end with."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            output: T = end.value
            return output


class Engine:
    """Reads prompts and generated units by a merged model; the module's weights are fixed.

    A batch runs on ``begin``, ``feed`` and ``gathered``, which a policy of the cache overrides.
    """

    def __init__(self, merged_model: MergedModel) -> None:
        self.merged_model, self.backbone = merged_model, merged_model.backbone
        self._inputs = UnitInputs(merged_model)
        self._latest: tuple[float, Matcher] | None = None

    def matcher(self, options: GenerateOptions) -> Matcher | None:
        """Return the matcher of generated tokens; None where they stay raw.

        The latest one of a bound on prices is kept.
        """
        if not options.merges_generated(self.merged_model):
            return None
        whole = self.merged_model.require_matcher()
        bound = options.decode_bound(self.merged_model)
        if bound is None:
            return whole
        latest = self._latest  # another thread may replace it
        if latest is None or latest[0] != bound:
            self._latest = latest = bound, Matcher(rules_under(whole.rules, bound))
        return latest[1]

    def generate(
        self,
        prompts: Sequence[TokenPrompt],
        options: GenerateOptions,
        past: GenerationState | Prefix | None = None,
    ) -> Generation:
        """Generate a continuation of every prompt: all of its ``steps``."""
        return exhaust(self.steps(prompts, options, past))

    def steps(
        self,
        prompts: Sequence[TokenPrompt],
        options: GenerateOptions,
        past: GenerationState | Prefix | None = None,
    ) -> Generator[None, None, Generation]:
        """Generate token by token.

        Args:
            prompts: Raw ids per row [T_b], of any lengths, at least one token each, with the parts
                that may merge where that is not all (``PromptIds``). With ``past`` only what is
                added to it.
            options: Settings are taken as they are given; none comes from the model.
            past: The state of an earlier output, or a prefix of all prompts; it is not read again.

        Yields:
            After every token.
        """
        state = past.fork(len(prompts)) if isinstance(past, Prefix) else past
        if state is not None:  # a turn that is refused here took nothing that it could give back
            state.check(len(prompts), self.merged_model)
        complete = False
        try:
            rows, columns, timings = yield from Batch(self).run(prompts, options, state)
            complete = True
        finally:
            if state is not None and complete:
                state.release()
            elif state is not None:  # it failed, or the generator was abandoned
                state.give_back()
        after = GenerationState(tuple(tuple(row.raw) for row in rows), columns, self.merged_model)
        if options.span_eviction is not None:
            after.release()  # its positions are not known without the columns that went
        return Generation(tuple(rows), timings, after, options)

    @torch.no_grad()
    def prefix(self, prompt: TokenPrompt, options: GenerateOptions) -> Prefix:
        """Read a text like a prompt of ``steps``, into a cache that many requests continue."""
        read = read_prompts([prompt], None, options.reading(self.merged_model))
        cache = self._cache_for(read, options, 1, None, several=False)
        self._prefill(read, cache, [0])
        ids, spans = tuple(read.ids[0].tolist()), merged_spans(read.cuts[0])
        return Prefix(ids, spans, cache, self.merged_model)

    def begin(
        self,
        prompts: Prompts,
        options: GenerateOptions,
        new: int,
        past: GenerationState | None,
        shared: SharedPrefix | None,
        several: bool,
    ) -> tuple[Any, Tensor]:
        """Read prompts: columns, in rows side by side for each sample, and logits [B, V].

        There is room for so many new tokens. ``shared`` has columns of the only prompt; several
        rows may run together.
        """
        cache = self._cache_for(prompts, options, new, past, several)
        before = [0] * len(prompts.ids) if past is None else [len(ids) for ids in past.fed_ids]
        if shared is not None:
            shared.cache.allow(cache.units.max_length, cache.evictable.max_length)
            cache, before = shared.cache, [shared.tokens]
            prompts = prompts.behind(shared.tokens, shared.units)
        logits = self._prefill(prompts, cache, before)
        return cache.repeated(options.samples), logits.repeat_interleave(options.samples, 0)

    def _cache_for(
        self,
        prompts: Prompts,
        options: GenerateOptions,
        new: int,
        past: GenerationState | None,
        several: bool,
    ) -> UnitCache:
        """Return a cache with room for so many new tokens: a new one, or that of ``past``."""
        units = prompts.packed.unit_counts.cpu()
        raw = prompts.packed.raw_counts.cpu()
        if past is not None:
            units = units + torch.tensor(past.cache_lengths)
            raw = raw + torch.tensor([len(ids) for ids in past.fed_ids])
        limit = positions_taken(int(units.max()), new)
        most_raw = positions_taken(int(raw.max()), new)
        preserved = self.merged_model.unit_positions == "preserved"
        highest = most_raw if preserved else limit
        check_room(self.backbone, highest, new)
        evicts = options.span_eviction is not None
        if several or preserved or evicts:  # one row keeps the backbone's windows
            check_attention_window(self.backbone.model.config, max(limit, highest))
        if past is None:
            return UnitCache.empty(self.merged_model, len(units), limit, most_raw)
        # Short prompts are padded to the widest, wherever their rows begin.
        padded = max(past.cache_lengths) + prompts.packed.token_ids.shape[1]
        wide = max(len(ids) for ids in past.raw_ids) + max(map(len, prompts.ids))
        cache = past.take()
        cache.allow(max(limit, padded), max(most_raw, wide))
        return cache

    def _prefill(self, prompts: Prompts, unit_cache: UnitCache, past: Sequence[int]) -> Tensor:
        """Fill the cache with the prompts' units; return the logits after each row's last [B, V].

        ``past`` are the raw tokens that each row holds already.
        """
        packed, cache = prompts.packed, unit_cache.units
        states = self._inputs.of_prompts(prompts, unit_cache, past)
        cache.begin(packed.token_ids.shape[1])
        if self.merged_model.unit_positions == "preserved":
            before = torch.tensor(past, device=self.backbone.device)[:, None]
            positions = packed.position_ids("preserved") + before
        else:  # padding takes its row's last position: its column may lie beyond the backbone's
            last_unit = cache.plan.columns[:, :1] + packed.unit_counts[:, None] - 1
            positions = cache.plan.columns.minimum(last_unit)
        trunk = self.merged_model.trunk
        with trunk.adapting(packed.lengths > 1):
            hidden = trunk.upper.on_cache(states, cache, positions)
        cache.commit(packed.unit_counts.cpu())
        last = packed.unit_counts - 1
        if hidden.dtype.itemsize > 2 and bool((last == hidden.shape[1] - 1).all()):
            # A slice, as in transformers: other strides take another GEMM kernel and change the
            # last bit of the logits (seen on CPU, float32).
            return self.backbone.head(hidden[:, -1:])[:, 0]
        # A matrix [B, d]: of a slice in half precision, torch multiplies each row with a copy of
        # the head of its own; 184 ms on one core against 5, with a head of 49,152 x 576.
        return self.backbone.head(hidden[torch.arange(len(last), device=hidden.device), last])

    def feed(self, step: Advance, tokens: Ints, columns: Any, positions: Tensor | None) -> Tensor:
        """Roll back, feed one unit per row, return the next logits [B, V].

        The newest tokens [B] of ended rows mean nothing. Positions [B, 1] are those of the newest
        tokens; None where they are columns.
        """
        cache, trunk = columns.units, self.merged_model.trunk
        if step.rollback.any():
            cache.rollback(torch.from_numpy(step.rollback))
        states = self._inputs.of_step(step, tokens, columns, positions)
        cache.begin(1)
        with trunk.adapting(torch.from_numpy(step.lengths > 1)):
            hidden = trunk.upper.on_cache(states, cache, positions)
        cache.commit(torch.from_numpy(step.lengths > 0))
        return self.backbone.head(hidden)[:, 0]

    def gathered(self, places: Sequence[tuple[Any, int]]) -> Any:
        """Return columns with copies of rows of others."""
        return UnitCache.of_rows(places)


@dataclass(eq=False)
class _Request:
    """Rows that joined together, and what chooses their tokens; logits are of those present."""

    options: GenerateOptions
    rows: list[Row]
    present: list[int]
    units: GeneratedUnits
    chooser: TokenChooser
    stopper: Stopper
    eviction: RowEviction | None
    logits: Tensor

    def advance(self) -> Advance:
        """Cut the tokens chosen last into units."""
        tokens = np.array([row.raw[-1] for row in self.rows], dtype=np.int64)
        running = np.array([row.running and n in self.present for n, row in enumerate(self.rows)])
        if self.eviction is not None:
            self.eviction.push(tokens, running)
        step = self.units.push(tokens, running)
        if len(self.present) == len(self.rows):
            return step
        return Advance(*(of[self.present] for of in (step.rollback, step.spans, step.lengths)))

    def note(self, logits: Tensor, lengths: Tensor) -> None:
        """Note what a forward gave the rows that are present: logits [P, V], columns [P]."""
        self.logits = logits
        for number, length in zip(self.present, lengths.tolist(), strict=True):
            if self.rows[number].running:
                self.rows[number]._lengths.append(length)
        if self.options.observer is not None:
            rows = [self.rows[number] for number in self.present]
            generated = tuple(row.ids for row in rows)
            running = tuple(row.running for row in rows)
            self.options.observer(Forward(logits, lengths.clone(), generated, running))

    def choose(self) -> None:
        """Give every row that runs its next token, and end rows."""
        logits = self.logits
        if len(self.present) < len(self.rows):
            logits = logits.new_zeros(len(self.rows), logits.shape[1])
            logits[self.present] = self.logits
        running = [row.running and n in self.present for n, row in enumerate(self.rows)]
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
        scores, chosen = log_probs(logits, np.array(tokens, dtype=np.int64))
        best = scores.topk(top, dim=-1)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        for row, value, (ids, values), runs in zip(self.rows, chosen, pairs, running, strict=True):
            if runs and row._logprobs is not None:
                row._logprobs.append(value)
                row._top_logprobs.append(tuple(zip(ids, values, strict=True)))


class Batch:
    """Rows that run together; for one thread.

    With a store others may join, and the columns of rows that leave are kept for prompts that begin
    alike.
    """

    def __init__(self, engine: Engine, store: PrefixStore | None = None) -> None:
        self._engine, self._store = engine, store
        self._requests: list[_Request] = []

    @property
    def rows(self) -> list[Row]:
        return [one.rows[number] for one in self._requests for number in one.present]

    def _most_new_tokens(self, prompts: Prompts) -> int:
        """Return how many tokens the backbone has room for behind prompts; below 1 for none."""
        model, packed = self._engine.merged_model, prompts.packed
        preserved = model.unit_positions == "preserved"
        held = packed.raw_counts if preserved else packed.unit_counts
        limits = (model.backbone.max_positions, attention_window(model.backbone.model.config))
        most = min((limit for limit in limits if limit is not None), default=sys.maxsize)
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
        for what continues a past, which ``Engine.steps`` has checked.
        """
        model = self._engine.merged_model
        config, samples = options.check(model, len(prompts)), options.samples
        new = config.max_new_tokens or 0
        unfed = None if past is None else past.unfed
        read = read_prompts(prompts, unfed, options.reading(model))
        if shorten:
            new = max(1, min(new, self._most_new_tokens(read)))
            options = options.setting(max_new_tokens=new)
            config = options.settings
        if options.overlong == "truncate" and past is None:
            read = cut_left(read, new, model)
        before = [()] * len(prompts) if past is None else past.fed_ids
        units = GeneratedUnits(self._engine.matcher(options), len(prompts) * samples)
        rows = [
            Row(
                [*fed, *ids.tolist()],
                len(fed),
                len(ids),
                cut,
                _units=units,
                _number=b * samples + n,
                _logprobs=None if options.logprobs is None else [],
            )
            for b, (fed, ids, cut) in enumerate(zip(before, read.ids, read.cuts, strict=True))
            for n in range(samples)
        ]
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
        eviction = RowEviction.of(options.span_eviction, model, rows, past is not None)
        shared, several = None, self._store is not None or len(rows) > 1
        if self._store is not None and len(prompts) == 1 and past is None:
            shared = self._store.find(read.ids[0], read.cuts[0][0])
        columns, logits = self._engine.begin(read, options, new, past, shared, several)
        for number, row in enumerate(rows):
            row._place, row.reused = (columns, number), 0 if shared is None else shared.units
        one = _Request(
            options, rows, list(range(len(rows))), units, chooser, stopper, eviction, logits
        )
        self._noted([one], columns, logits)
        self._requests.append(one)
        return rows

    @torch.no_grad()
    def step(self) -> list[Row]:
        """Feed the tokens chosen last, then choose one for every row that runs.

        Those that ended or failed are returned, too; once all of a request have, they leave.
        """
        begun = [one for one in self._requests if any(row.generated for row in one.rows)]
        if begun:
            self._feed(begun)
        stepped = self.rows
        for one in self._requests:
            one.choose()
        for one in list(self._requests):
            present = [one.rows[number] for number in one.present]
            if not any(row.running for row in present):
                self.leave(present)
        return stepped

    def run(
        self,
        prompts: Sequence[TokenPrompt],
        options: GenerateOptions,
        past: GenerationState | None = None,
    ) -> Generator[None, None, tuple[list[Row], Any, Timings]]:
        """Let rows join and step until they have ended; yield after every step.

        Returns:
            The rows, their columns and the time it took.
        """
        seconds, began, streamer = list[float](), time.perf_counter(), options.streamer
        rows = self.join(prompts, options, past)
        columns = self._together(rows)
        try:
            if streamer is not None:
                streamer.put(torch.tensor([rows[0].prompt_ids]))  # type: ignore[no-untyped-call]
            while self._requests:
                self.step()
                for row in rows:
                    if row.error is not None:
                        raise row.error
                if streamer is not None:
                    streamer.put(torch.tensor([rows[0].raw[-1]]))  # type: ignore[no-untyped-call]
                seconds.append(time.perf_counter() - began)
                yield
                began = time.perf_counter()
        finally:
            if streamer is not None:
                streamer.end()  # type: ignore[no-untyped-call]
        return rows, columns, Timings(seconds[0], sum(seconds[1:]))

    def leave(self, rows: Sequence[Row]) -> None:
        """Take rows out, whether they have ended or not; their columns go to the store."""
        for one in list(self._requests):
            gone = [n for n in one.present if any(one.rows[n] is row for row in rows)]
            stay = [place for place, n in enumerate(one.present) if n not in gone]
            if not gone:
                continue
            for row in (one.rows[n] for n in gone):
                whole = one.eviction is None and row.error is None and not row.past
                if self._store is not None and whole and row._place is not None:
                    self._store.put(*row.held(), row._place)
                row._place = None
            one.present, one.logits = [one.present[place] for place in stay], one.logits[stay]
            if not stay:
                self._requests.remove(one)

    def forget(self) -> None:
        """Free the columns that are kept for later prompts."""
        if self._store is not None:
            self._store.clear()

    def drop(self) -> None:
        """Take all rows out and keep no columns, those of earlier rows neither."""
        self._requests.clear()
        self.forget()

    def _feed(self, requests: Sequence[_Request]) -> None:
        """Read the tokens that some requests chose last."""
        rows = [(one, one.rows[number]) for one in requests for number in one.present]
        columns = self._together([row for _, row in rows])
        steps = [one.advance() for one in requests]
        step = Advance(
            np.concatenate([one.rollback for one in steps]),
            np.concatenate([one.spans for one in steps]),
            np.concatenate([one.lengths for one in steps]),
        )
        tokens = np.array([row.raw[-1] for _, row in rows], dtype=np.int64)
        positions, model = None, self._engine.merged_model
        preserved = model.unit_positions == "preserved"
        if preserved or any(one.eviction is not None for one in requests):
            held = (columns.lengths.numpy() - step.rollback).tolist()
            of_rows = [
                len(row.raw) - 1 if preserved or one.eviction is not None else length
                for (one, row), length in zip(rows, held, strict=True)
            ]
            positions = torch.tensor(of_rows, device=model.backbone.device)[:, None]
        logits = self._engine.feed(step, tokens, columns, positions)
        self._noted(requests, columns, logits)

    def _noted(self, requests: Sequence[_Request], columns: Any, logits: Tensor) -> None:
        """Drop the columns of old spans after a forward; hand logits [B, V] to their requests."""
        if any(one.eviction is not None for one in requests):
            gone: list[list[int]] = []
            for one in requests:
                old = [()] * len(one.rows) if one.eviction is None else one.eviction.take_old()
                gone += [list(old[number]) for number in one.present]
                for number in one.present:
                    one.rows[number].dropped += len(old[number])
            columns.evictable.drop(gone)
        lengths, first = columns.lengths, 0
        for one in requests:
            part = slice(first, first + len(one.present))
            one.note(logits[part], lengths[part])
            first = part.stop

    def _together(self, rows: Sequence[Row]) -> Any:
        """Return columns of exactly these rows, in order."""
        places = [row._place for row in rows if row._place is not None]
        columns = places[0][0]
        if [(id(of), row) for of, row in places] != [
            (id(columns), row) for row in range(len(columns.lengths))
        ]:
            columns = self._engine.gathered(places)
            for number, row in enumerate(rows):
                row._place = (columns, number)
        return columns
