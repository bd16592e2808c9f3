"""Batched generation over a cache that shrinks whenever generated tokens complete a rule.

One forward per token, always, with one new unit per row::

    prompt ids --match--> units --prefill--> cache, logits
    repeat: choose y; stop?; does a rule end at y among the generated tokens?
            no   feed e(y)                    cache length + 1
            yes  roll back its earlier units,
                 feed the surrogate           cache length - rolled back + 1

The last token of a row is never fed: nothing follows it, unless another turn continues the state.
Rows that have ended are fed along with the others and gain nothing. Samples of one prompt share its
prefill.

Positions are contiguous over units (``compact``, the paper's) or those of the units' last raw
tokens (``preserved``), as the module was trained.

Shapes: B rows, S prompt units of the longest row, W units per forward, d embedding size, V
vocabulary.
Source: paper, "Inference with UMIM".
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from umim_core.backbone import Backbone
from umim_core.errors import GenerationError
from umim_core.merging.attention import check_attention_window, step_mask
from umim_core.merging.cache import RowCache
from umim_core.merging.compress import PackedUnits, SpanMerger, fill_units
from umim_core.merging.generated import GeneratedUnits
from umim_core.merging.outputs import EngineOutput, Observer, Timings
from umim_core.merging.policies import UnitPositions
from umim_core.merging.prompts import Prompts, check_room, read_prompts
from umim_core.merging.request import Request
from umim_core.merging.rows import Row, choose_tokens, new_rows, record_forward
from umim_core.merging.sampling import TokenChooser, check_generation_config, samples_per_prompt
from umim_core.merging.span_cache import SpanCache
from umim_core.merging.state import GenerationState
from umim_core.merging.stopping import Stopper
from umim_core.rules.matcher import Matcher
from umim_core.rules.suffix import Advance

Steps = Generator[NDArray[np.int64], None, EngineOutput]


class Engine:
    """Generate with prompt merging and decoding-time merging.

    Args:
        backbone: The frozen model.
        module: Makes surrogates, its weights fixed; None only without rules.
        matcher: The rules; None for the base model.
        unit_positions: Positions of units in the backbone, as the module was trained.

    Raises:
        GenerationError: If there are rules but no module, or if the backbone has layers whose
            state cannot be rolled back.
    """

    def __init__(
        self,
        backbone: Backbone,
        module: SpanMerger | None,
        matcher: Matcher | None,
        *,
        unit_positions: UnitPositions = "compact",
    ) -> None:
        if matcher is not None and len(matcher.rules) and module is None:
            raise GenerationError("rules need a merge module", None, "Pass one, or no rules.")
        check_attention_window(backbone.model.config, 1)
        self.backbone, self.module, self.matcher = backbone, module, matcher
        self.unit_positions: UnitPositions = unit_positions
        self._spans = None if module is None else SpanCache(backbone, module)

    def generate(
        self,
        prompts: Sequence[NDArray[np.integer] | Sequence[int]],
        config: GenerationConfig,
        *,
        past: GenerationState | None = None,
        merge_prompt: bool = True,
        merge_decode: bool = True,
        match_border: bool = False,
        seed: int = 0,
        logprobs: int | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        streamer: BaseStreamer | None = None,
        observer: Observer | None = None,
    ) -> EngineOutput:
        """Generate a continuation of every prompt; see ``steps`` and ``Request``."""
        request = Request(
            merge_prompt=merge_prompt,
            merge_decode=merge_decode,
            match_border=match_border,
            seed=seed,
            logprobs=logprobs,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            streamer=streamer,
            observer=observer,
        )
        return self.run(prompts, config, request, past)

    def run(
        self,
        prompts: Sequence[NDArray[np.integer] | Sequence[int]],
        config: GenerationConfig,
        request: Request,
        past: GenerationState | None = None,
    ) -> EngineOutput:
        """Take all the ``steps``."""
        steps = self.steps(prompts, config, request, past)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                output: EngineOutput = end.value
                return output

    @torch.no_grad()
    def steps(
        self,
        prompts: Sequence[NDArray[np.integer] | Sequence[int]],
        config: GenerationConfig,
        request: Request,
        past: GenerationState | None = None,
    ) -> Steps:
        """Generate token by token.

        Args:
            prompts: Raw ids per row [T_b], of any lengths, at least one token each. With ``past``
                only what is added to it.
            config: ``max_new_tokens`` and the settings named in ``sampling``; others are refused.
            request: Everything else.
            past: The state of an earlier output; its past is not read again.

        Yields:
            The ids just chosen [B]; those of rows that have ended mean nothing.

        Returns:
            Raw ids, spans and cache lengths per row.

        Raises:
            GenerationError: If there is no prompt, a prompt is empty or holds an id outside the
                vocabulary, an option is not supported, the state was continued before, or units and
                new tokens exceed the backbone's positions or attention window.
        """
        start = time.perf_counter()
        check_generation_config(config)
        if past is not None:
            past.check(len(prompts))
        samples = samples_per_prompt(config)
        request.check(self.backbone.vocab_size, len(prompts) * samples)
        given = read_prompts(
            prompts,
            None if past is None else [ids[-1] for ids in past.raw_ids],
            self.backbone,
            self.matcher if request.merge_prompt else None,
        )
        rows = new_rows(given, past, samples)
        chooser = TokenChooser(
            config, [len(row.raw) for row in rows], request.seed, request.logits_processor
        )
        stopper = Stopper(config, self.backbone.tokenizer, request.stopping_criteria)
        units = GeneratedUnits(self.matcher if request.merge_decode else None, len(rows))
        if request.match_border:
            units.open_border([(np.array(row.prompt_ids), row.cut) for row in rows])
        if request.streamer is not None:
            request.streamer.put(torch.tensor([rows[0].prompt_ids]))  # type: ignore[no-untyped-call]
        cache = self._room(given, past, config)
        logits = self._prefill(given.packed, cache, [row.past for row in rows[::samples]])
        cache.repeat(samples)
        logits = logits.repeat_interleave(samples, dim=0)
        first = 0.0
        while True:
            record_forward(rows, logits, cache.lengths, request.observer)
            tokens = choose_tokens(rows, logits, chooser, stopper, request.logprobs)
            first = first or time.perf_counter() - start
            if request.streamer is not None:
                request.streamer.put(torch.from_numpy(tokens))  # type: ignore[no-untyped-call]
            yield tokens
            running = np.array([row.stop_reason is None for row in rows])
            if not running.any():
                break
            logits = self._feed(units.push(tokens, running), cache, rows)
        if request.streamer is not None:
            request.streamer.end()  # type: ignore[no-untyped-call]
        scored = request.logprobs is not None
        return EngineOutput(
            tuple(row.output(units, b, scored) for b, row in enumerate(rows)),
            Timings(first, time.perf_counter() - start - first),
            GenerationState(tuple(tuple(row.raw) for row in rows), cache),
        )

    def _room(
        self, given: Prompts, past: GenerationState | None, config: GenerationConfig
    ) -> RowCache:
        """Return a cache with room for the request: a new one, or that of ``past``."""
        new = config.max_new_tokens or 0
        units = given.packed.unit_counts.cpu()
        raw = given.packed.raw_counts.cpu()
        if past is not None:
            units = units + torch.tensor(past.cache_lengths)
            raw = raw + torch.tensor([len(ids) - 1 for ids in past.raw_ids])
        # The last token chosen is never fed.
        limit = int(units.max()) + new - 1
        highest = int(raw.max()) + new - 1 if self.unit_positions == "preserved" else limit
        check_room(self.backbone, limit, highest, new)
        if past is None:
            layers = self.backbone.model.config.num_hidden_layers
            return RowCache(layers, len(units), limit, self.backbone.device)
        cache = past.take()
        cache.allow(limit)
        return cache

    def _forward(self, embeddings: Tensor, cache: RowCache, positions: Tensor | None) -> Tensor:
        """Run W units per row [B, W, d] through the trunk on top of the cache: [B, W, d].

        ``begin`` was called; ``positions`` [B, W] are None where units take their columns'.
        """
        out = self.backbone.model.base_model(
            inputs_embeds=embeddings,
            attention_mask=step_mask(cache, embeddings.dtype),
            position_ids=cache.columns if positions is None else positions,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        assert isinstance(out, Tensor)  # noqa: S101  every transformers trunk returns one
        return out

    def _prefill(self, packed: PackedUnits, cache: RowCache, past: Sequence[int]) -> Tensor:
        """Fill the cache with the prompts' units; return the logits after each row's last [B, V].

        Args:
            packed: The prompts.
            cache: Where they go.
            past: Raw tokens that each row holds already.
        """
        positions = None
        if self.unit_positions == "preserved":
            before = torch.tensor(past, device=self.backbone.device)[:, None]
            positions = packed.position_ids("preserved") + before
        cache.begin(packed.token_ids.shape[1])
        hidden = self._forward(self._unit_embeddings(packed), cache, positions)
        cache.commit(packed.unit_counts.cpu())
        last = packed.unit_counts - 1
        if bool((last == hidden.shape[1] - 1).all()):
            # A slice, as in transformers: a gather's other strides take another GEMM kernel and
            # change the last bit of the logits (seen on CPU, float32).
            return self.backbone.head(hidden[:, -1:])[:, 0]
        at_last = hidden[torch.arange(len(last), device=hidden.device), last]
        return self.backbone.head(at_last[:, None])[:, 0]

    def _unit_embeddings(self, packed: PackedUnits) -> Tensor:
        """Embed the units of the prompts [B, S, d]."""
        if self._spans is None or not len(packed.span_ids):
            return self.backbone.embed(packed.token_ids)
        pooled = self._spans.merge(packed.span_ids, packed.span_lengths)
        return fill_units(packed, self.backbone, pooled)

    def _feed(self, step: Advance, cache: RowCache, rows: Sequence[Row]) -> Tensor:
        """Roll back, feed one unit per row, return the next logits [B, V]."""
        if step.rollback.any():
            cache.rollback(torch.from_numpy(step.rollback))
        cache.begin(1)
        positions = None
        if self.unit_positions == "preserved":
            fed = [[len(row.raw) - 1] for row in rows]
            positions = torch.tensor(fed, device=self.backbone.device)
        hidden = self._forward(self._step_embeddings(step), cache, positions)
        cache.commit(torch.from_numpy(step.lengths > 0))
        return self.backbone.head(hidden)[:, 0]

    def _step_embeddings(self, step: Advance) -> Tensor:
        """Embed the unit of each row [B, 1, d]; an ended row is fed id 0."""
        device = self.backbone.device
        embeddings = self.backbone.embed(torch.from_numpy(step.spans[:, :1]).to(device))
        merged = np.flatnonzero(step.lengths > 1)
        if merged.size and self._spans is not None:
            pairs = zip(step.spans[merged].tolist(), step.lengths[merged].tolist(), strict=True)
            found = self._spans.find([tuple(ids[:n]) for ids, n in pairs])
            embeddings[torch.from_numpy(merged).to(device), 0] = found
        return embeddings
