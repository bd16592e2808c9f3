"""Rows of many requests in one batch; each joins and leaves between two forwards.

    forward   1     2     3     4     5
    row a     p a1  a2    a3    -           p: prefill, on its own
    row b           p b1  b2    b3    b4
    row c                       p c1  c2    takes the memory that a has left

A row's tokens do not depend on the others: it has its own rules, choice of tokens and stopping, and
in the forward the batch has only one unit of it. A change of rows copies their columns once.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from umim_core.backbone.attention_masks import attention_window, check_attention_window
from umim_core.errors import GenerationError, NumericalError
from umim_core.inference.engine import Engine
from umim_core.inference.options import GenerateOptions
from umim_core.inference.prefix_store import Ints, PrefixStore, SharedPrefix
from umim_core.inference.prompts import Prompts, TokenPrompt, read_prompts
from umim_core.inference.rows import GeneratedUnits, Row, choose_tokens, new_rows
from umim_core.inference.sampling import TokenChooser, fresh_seed
from umim_core.inference.stopping import Stopper
from umim_core.inference.unit_cache import UnitCache
from umim_core.merging.packing import pack_rows
from umim_core.rules.matcher import Advance


@dataclass(eq=False)
class LiveRow:
    """One row of a batch: its ids and why it ended; None while it runs.

    Attributes:
        reused: Units of its prompt that were not evaluated.
        error: Why it failed, if it did; it has left the batch then.
    """

    row: Row
    reused: int
    error: GenerationError | NumericalError | None = None
    _units: GeneratedUnits = field(kw_only=True, repr=False)
    _chooser: TokenChooser = field(kw_only=True, repr=False)
    _stopper: Stopper = field(kw_only=True, repr=False)
    _place: tuple[UnitCache, int] = field(kw_only=True, repr=False)
    _logits: Tensor = field(kw_only=True, repr=False)  # [1, V]
    _fed: int = field(kw_only=True, default=0)  # generated tokens

    @property
    def prompt_units(self) -> int:
        """Units of the prompt, those taken over included."""
        return len(self.row.cut[0])

    @property
    def running(self) -> bool:
        """Whether it goes on."""
        return self.row.stop_reason is None and self.error is None

    def choose(self) -> None:
        """Choose the next token."""
        try:
            choose_tokens([self.row], self._logits, self._chooser, self._stopper, None)
        except (GenerationError, NumericalError) as error:
            self.error = error

    def push(self) -> Advance:
        """Cut the token just chosen into units."""
        self._fed += 1
        return self._units.push(np.array(self.row.raw[-1:]), np.array([True]))

    def held(self) -> tuple[Ints, Ints]:
        """Return the raw ids in the cache [T], and where their units start [S]."""
        prompt = self.row.prompt
        starts = np.ones(self._fed, dtype=bool)
        for start, length in self._units.spans(0):
            starts[start + 1 : start + length] = False
        generated = np.flatnonzero(starts) + prompt
        ids = np.array(self.row.raw[: prompt + self._fed], dtype=np.int64)
        return ids, np.concatenate([self.row.cut[0], generated])


class RowBatch:
    """Rows that run together; for one thread."""

    def __init__(self, engine: Engine, store: PrefixStore) -> None:
        self._engine, self._store = engine, store
        self.rows: list[LiveRow] = []

    def room(self, prompt: TokenPrompt, options: GenerateOptions) -> int:
        """Return how many tokens the backbone has room for behind a prompt; below 1 for none."""
        merged_model, backbone = self._engine.merged_model, self._engine.backbone
        prompts = read_prompts([prompt], None, options.reading(merged_model))
        packed = prompts.packed
        held = packed.raw_counts if self._engine.preserved else packed.unit_counts
        limits = (backbone.max_positions, attention_window(backbone.model.config))
        most = min((limit for limit in limits if limit is not None), default=sys.maxsize)
        return most - int(held[0]) + 1  # the last token is never fed

    @torch.no_grad()
    def join(self, prompt: TokenPrompt, options: GenerateOptions) -> list[LiveRow]:
        """Read a prompt and add its rows, one per sample; settings are those of ``Engine.steps``.

        Of the others ``merge``, ``raw_tail``, ``decode_max_damage`` and ``seed`` count.
        """
        engine = self._engine
        merged_model, backbone = engine.merged_model, engine.backbone
        config, samples = options.check(merged_model, 1), options.samples
        prompts = read_prompts([prompt], None, options.reading(merged_model))
        cache = engine.room(prompts, None, config.max_new_tokens or 0, options)
        check_attention_window(backbone.model.config, cache.units.max_length)
        shared = self._store.find(prompts.ids[0], prompts.cuts[0][0])
        rows = new_rows(prompts, None, samples)
        seed = fresh_seed() if options.seed is None else options.seed
        choosers = [
            TokenChooser(config, [row.prompt], seed, streams=[number], device=backbone.device)
            for number, row in enumerate(rows)
        ]
        stopper = Stopper(config, backbone.tokenizer)
        if shared is not None:
            shared.cache.allow(cache.units.max_length, cache.evictable.max_length)
            cache = shared.cache
        logits = engine.prefill(
            _behind(prompts, shared), cache, [0 if shared is None else shared.tokens]
        )
        cache = cache.repeated(samples)
        matcher = engine.decode_rules.matcher(options)
        live = [
            LiveRow(
                row,
                0 if shared is None else shared.units,
                _units=GeneratedUnits(matcher, 1),
                _chooser=chooser,
                _stopper=stopper,
                _place=(cache, number),
                _logits=logits,
            )
            for number, (row, chooser) in enumerate(zip(rows, choosers, strict=True))
        ]
        self.rows += live
        return live

    @torch.no_grad()
    def step(self) -> list[LiveRow]:
        """Choose a token for every row, and feed those of the rows that go on.

        Those that ended or failed are returned, too, and have left.
        """
        stepped = list(self.rows)
        for live in stepped:
            live.choose()
        self.leave([live for live in stepped if not live.running])
        if self.rows:
            self._feed()
        return stepped

    def leave(self, rows: Sequence[LiveRow]) -> None:
        """Take rows out, whether they have ended or not; their columns go to the store."""
        for live in rows:
            if live in self.rows:
                self.rows.remove(live)
                if live.error is None:
                    self._store.put(*live.held(), live._place)

    def forget(self) -> None:
        """Free the columns that are kept for later prompts."""
        self._store.clear()

    def drop(self) -> None:
        """Take all rows out and keep no columns, those of earlier rows neither."""
        self.rows.clear()
        self.forget()

    def _feed(self) -> None:
        rows, engine = self.rows, self._engine
        cache = self._together()
        steps = [live.push() for live in rows]
        step = Advance(
            np.concatenate([one.rollback for one in steps]),
            np.concatenate([one.spans for one in steps]),
            np.concatenate([one.lengths for one in steps]),
        )
        tokens = np.array([live.row.raw[-1] for live in rows], dtype=np.int64)
        raw_lengths = [len(live.row.raw) for live in rows] if engine.preserved else None
        logits = engine.feed(step, tokens, cache, raw_lengths)
        for live, own in zip(rows, logits[:, None], strict=True):
            live._logits = own

    def _together(self) -> UnitCache:
        """Return the cache of exactly the rows that run, in order."""
        cache = self.rows[0]._place[0]
        places = [live._place for live in self.rows]
        if [(id(held), row) for held, row in places] == [
            (id(cache), row) for row in range(len(cache.lengths))
        ]:
            return cache
        cache = UnitCache.of_rows(places)
        for number, live in enumerate(self.rows):
            live._place = (cache, number)
        return cache


def _behind(prompts: Prompts, shared: SharedPrefix | None) -> Prompts:
    """Return what of a prompt is to be evaluated."""
    if shared is None:
        return prompts
    ids = prompts.ids[0][shared.tokens :]
    starts, lengths = prompts.cuts[0]
    cut = (starts[shared.units :] - shared.tokens, lengths[shared.units :])
    return Prompts([ids], [cut], pack_rows([ids], [cut], device=prompts.packed.starts.device))
