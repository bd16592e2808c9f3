"""Batched generation over a cache that shrinks whenever generated tokens complete a rule.

One forward per token, always, with one new unit per row::

    prompt ids --match--> units --prefill--> cache, logits
    repeat: choose y; stop?; does a rule end at y among the generated tokens?
            no   feed e(y)                    cache length + 1
            yes  roll back its earlier units,
                 feed the surrogate           cache length - rolled back + 1

Prompts merge by all rules, y by those of ``decode_rules``. With ``span_eviction`` nothing is
merged, and the columns of old spans go (``row_eviction``).

The last token of a row is never fed: nothing follows it, unless another turn continues the state.
Rows that have ended are fed, too, and gain nothing. Samples of one prompt share its prefill.

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

from collections.abc import Generator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umim_core.backbone.attention_masks import check_attention_window
from umim_core.inference.options import GenerateOptions
from umim_core.inference.outputs import EngineOutput, GenerationState, LapClock, Prefix, Timings
from umim_core.inference.prompts import Prompts, TokenPrompt, check_room, cut_left, read_prompts
from umim_core.inference.row_eviction import row_eviction
from umim_core.inference.rows import (
    GeneratedUnits,
    choose_tokens,
    new_rows,
    record_forward,
)
from umim_core.inference.sampling import TokenChooser
from umim_core.inference.stopping import Stopper
from umim_core.inference.unit_cache import UnitCache, UnitInputs, new_cache, run_layers
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Advance, Matcher
from umim_core.rules.pruning import rules_under

Steps = Generator[NDArray[np.int64], None, EngineOutput]


class DecodeRules:
    """Matchers of generated tokens, made of a model's rules; the latest one is kept."""

    def __init__(self, merged_model: MergedModel) -> None:
        self._merged_model = merged_model
        self._latest: tuple[float, Matcher] | None = None

    def matcher(self, options: GenerateOptions) -> Matcher | None:
        """Return the matcher of generated tokens; None where they stay raw."""
        if options.merge not in (None, "all") or self._merged_model.matcher is None:
            return None
        whole = self._merged_model.require_matcher()
        bound = options.decode_bound(self._merged_model)
        if bound is None:
            return whole
        latest = self._latest  # another thread may replace it
        if latest is None or latest[0] != bound:
            self._latest = latest = bound, Matcher(rules_under(whole.rules, bound))
        return latest[1]


def exhaust(steps: Steps) -> EngineOutput:
    """Take all steps of a request and return what they end with."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            output: EngineOutput = end.value
            return output


class Engine:
    """Generate with prompt merging and decoding-time merging; the module's weights are fixed."""

    def __init__(self, merged_model: MergedModel) -> None:
        self.merged_model, self.backbone = merged_model, merged_model.backbone
        self.preserved = merged_model.unit_positions == "preserved"
        self._inputs = UnitInputs(merged_model)
        self.decode_rules = DecodeRules(merged_model)

    def generate(
        self,
        prompts: Sequence[TokenPrompt],
        options: GenerateOptions,
        past: GenerationState | Prefix | None = None,
    ) -> EngineOutput:
        """Generate a continuation of every prompt: all of its ``steps``."""
        return exhaust(self.steps(prompts, options, past))

    @torch.no_grad()
    def steps(
        self,
        prompts: Sequence[TokenPrompt],
        options: GenerateOptions,
        past: GenerationState | Prefix | None = None,
    ) -> Steps:
        """Generate token by token.

        Args:
            prompts: Raw ids per row [T_b], of any lengths, at least one token each, with the parts
                that may merge where that is not all (``PromptIds``). With ``past`` only what is
                added to it.
            options: Settings are taken as they are given; none comes from the model.
            past: The state of an earlier output, or a prefix of all prompts; it is not read again.

        Yields:
            The ids just chosen [B]; those of rows that have ended mean nothing.

        Returns:
            Raw ids, spans and cache lengths per row.
        """
        clock = LapClock()
        if isinstance(past, Prefix):
            past = past.fork(len(prompts))
        if past is not None:
            past.check(len(prompts), self.merged_model)
        config, samples = options.check(self.merged_model, len(prompts)), options.samples
        read = read_prompts(
            prompts,
            None if past is None else past.unfed,
            options.reading(self.merged_model),
        )
        if options.overlong == "truncate" and past is None:
            read = cut_left(read, config.max_new_tokens or 0, self.merged_model)
        rows = new_rows(read, past, samples)
        eviction = row_eviction(options, self.merged_model, rows, past)
        chooser = TokenChooser(
            config,
            [len(row.raw) for row in rows],
            options.seed,
            options.logits_processor,
            past_lengths=[row.past for row in rows],
            streams=options.streams,
            device=self.backbone.device,
        )
        stopper = Stopper(config, self.backbone.tokenizer, options.stopping_criteria)
        units = GeneratedUnits(self.decode_rules.matcher(options), len(rows))
        first_cache = self.room(read, past, config.max_new_tokens or 0, options)
        streamer, complete = options.streamer, False
        try:
            if streamer is not None:
                streamer.put(torch.tensor([rows[0].prompt_ids]))  # type: ignore[no-untyped-call]
            before = [row.past for row in rows[::samples]]
            logits = self.prefill(read, first_cache, before).repeat_interleave(samples, 0)
            cache = first_cache.repeated(samples)
            while True:
                if eviction is not None:
                    eviction.drop(cache.evictable)
                record_forward(rows, logits, cache.lengths, options.observer)
                tokens = choose_tokens(rows, logits, chooser, stopper, options.logprobs)
                if streamer is not None:
                    streamer.put(torch.from_numpy(tokens))  # type: ignore[no-untyped-call]
                clock.stop()
                yield tokens
                clock.start()
                running = np.array([row.stop_reason is None for row in rows])
                if not running.any():
                    break
                if eviction is not None:
                    eviction.push(tokens, running)
                given_positions = self.preserved or eviction is not None
                raw_lengths = [len(row.raw) for row in rows] if given_positions else None
                step = units.push(tokens, running)
                logits = self.feed(step, tokens, cache, raw_lengths)
            complete = True
        finally:
            if past is not None and not complete:  # it failed, or the generator was abandoned
                past.give_back(first_cache)
            if streamer is not None:
                streamer.end()  # type: ignore[no-untyped-call]
        state = GenerationState(tuple(tuple(row.raw) for row in rows), cache, self.merged_model)
        if eviction is not None:  # its positions are not known without the columns that went
            state.release()
        return EngineOutput(
            tuple(row.output(units, b, options.logprobs is not None) for b, row in enumerate(rows)),
            Timings(clock.laps[0], sum(clock.laps[1:])),
            state,
            options.merge or "all",
            options.raw_tail or 0,
            options.span_eviction,
            () if eviction is None else eviction.dropped,
        )

    @torch.no_grad()
    def prefix(self, prompt: TokenPrompt, options: GenerateOptions) -> Prefix:
        """Read a text like a prompt of ``steps``, into a cache that many requests continue."""
        options = replace(options, max_new_tokens=1)
        options.check(self.merged_model, 1)
        read = read_prompts([prompt], None, options.reading(self.merged_model))
        cache = self.room(read, None, 1, options)
        self.prefill(read, cache, [0])
        [(starts, lengths)] = read.cuts
        spans = zip(starts.tolist(), lengths.tolist(), strict=True)
        merged = tuple((start, length) for start, length in spans if length > 1)
        return Prefix(tuple(read.ids[0].tolist()), merged, cache, self.merged_model)

    def room(
        self,
        prompts: Prompts,
        past: GenerationState | None,
        new: int,
        options: GenerateOptions,
    ) -> UnitCache:
        """Return a cache with room for so many new tokens: a new one, or that of ``past``."""
        units = prompts.packed.unit_counts.cpu()
        raw = prompts.packed.raw_counts.cpu()
        if past is not None:
            units = units + torch.tensor(past.cache_lengths)
            raw = raw + torch.tensor([len(ids) for ids in past.fed_ids])
        # The last token chosen is never fed.
        limit, most_raw = int(units.max()) + new - 1, int(raw.max()) + new - 1
        highest = most_raw if self.preserved else limit
        check_room(self.backbone, highest, new)
        rows = len(units) * options.samples
        evicts = options.span_eviction is not None
        if rows > 1 or self.preserved or evicts:  # one row keeps the backbone's windows
            check_attention_window(self.backbone.model.config, max(limit, highest))
        if past is None:
            depth = self.merged_model.merge_depth
            layers = (self.backbone.num_layers - depth, depth)
            return new_cache(layers, len(units), limit, most_raw, self.backbone.device)
        # Short prompts are padded to the widest, wherever their rows begin.
        padded = max(past.cache_lengths) + prompts.packed.token_ids.shape[1]
        wide = max(len(ids) for ids in past.raw_ids) + max(map(len, prompts.ids))
        cache = past.take()
        cache.allow(max(limit, padded), max(most_raw, wide))
        return cache

    def prefill(self, prompts: Prompts, unit_cache: UnitCache, past: Sequence[int]) -> Tensor:
        """Fill the cache with the prompts' units; return the logits after each row's last [B, V].

        ``past`` are the raw tokens that each row holds already.
        """
        packed, cache = prompts.packed, unit_cache.units
        states = self._inputs.of_prompts(prompts, unit_cache, past)
        cache.begin(packed.token_ids.shape[1])
        if self.preserved:
            before = torch.tensor(past, device=self.backbone.device)[:, None]
            positions = packed.position_ids("preserved") + before
        else:  # padding takes its row's last position: its column may lie beyond the backbone's
            last_unit = cache.columns[:, :1] + packed.unit_counts[:, None] - 1
            positions = cache.columns.minimum(last_unit)
        trunk = self.merged_model.trunk
        with trunk.adapting(packed.lengths > 1):
            hidden = run_layers(trunk.upper, states, cache, positions)
        cache.commit(packed.unit_counts.cpu())
        last = packed.unit_counts - 1
        if hidden.dtype.itemsize > 2 and bool((last == hidden.shape[1] - 1).all()):
            # A slice, as in transformers: other strides take another GEMM kernel and change the
            # last bit of the logits (seen on CPU, float32).
            return self.backbone.head(hidden[:, -1:])[:, 0]
        # A matrix [B, d]: of a slice in half precision, torch multiplies each row with a copy of
        # the head of its own; 184 ms on one core against 5, with a head of 49,152 x 576.
        return self.backbone.head(hidden[torch.arange(len(last), device=hidden.device), last])

    def feed(
        self,
        step: Advance,
        tokens: NDArray[np.int64],
        unit_cache: UnitCache,
        raw_lengths: Sequence[int] | None,
    ) -> Tensor:
        """Roll back, feed one unit per row, return the next logits [B, V].

        The newest tokens [B] of ended rows mean nothing. ``raw_lengths`` are the raw tokens per
        row, the newest included; None where positions are columns.
        """
        cache, trunk = unit_cache.units, self.merged_model.trunk
        positions = None
        if raw_lengths is not None:
            positions = torch.tensor(raw_lengths, device=self.backbone.device)[:, None] - 1
        if step.rollback.any():
            cache.rollback(torch.from_numpy(step.rollback))
        states = self._inputs.of_step(step, tokens, unit_cache, positions)
        cache.begin(1)
        with trunk.adapting(torch.from_numpy(step.lengths > 1)):
            hidden = run_layers(trunk.upper, states, cache, positions)
        cache.commit(torch.from_numpy(step.lengths > 0))
        return self.backbone.head(hidden)[:, 0]
