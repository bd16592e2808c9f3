"""Batched generation over a cache that shrinks whenever generated tokens complete a rule.

One forward per token, always, with one new unit per row::

    prompt ids --match--> units --prefill--> cache, logits
    repeat: choose y; stop?; does a rule end at y among the generated tokens?
            no   feed e(y)                    cache length + 1
            yes  roll back its earlier units,
                 feed the surrogate           cache length - rolled back + 1

The last token of a row is never fed: nothing follows it. Rows that have ended are fed along with
the others and gain nothing. Positions are contiguous over units (``compact``).

Shapes: B rows, S prompt units of the longest row, d embedding size, V vocabulary.
Source: paper, "Inference with UMIM".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig

from umim_core.backbone import Backbone
from umim_core.errors import GenerationError
from umim_core.merging.attention import check_attention_window, step_mask
from umim_core.merging.cache import RowCache
from umim_core.merging.compress import (
    PackedUnits,
    SpanMerger,
    pack_rows,
    segmentation,
    surrogates,
    unit_embeddings,
)
from umim_core.merging.generated import GeneratedUnits
from umim_core.merging.outputs import EngineOutput, Forward, Observer, RowOutput, Spans
from umim_core.merging.sampling import Stopper, StopReason, TokenChooser, check_generation_config
from umim_core.rules.matcher import Matcher
from umim_core.rules.suffix import Advance


@dataclass
class _Row:
    """State of one row under way."""

    raw: list[int]  # prompt and generated ids
    prompt_length: int
    cache_lengths: list[int] = field(default_factory=list)
    stop_reason: StopReason | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """Generated ids."""
        return tuple(self.raw[self.prompt_length :])


class Engine:
    """Generate with prompt merging and decoding-time merging.

    Args:
        backbone: The frozen model.
        module: Makes surrogates; None only without rules.
        matcher: The rules; None for the base model.

    Raises:
        GenerationError: If there are rules but no module, or if the backbone has layers whose
            state cannot be rolled back.
    """

    def __init__(
        self, backbone: Backbone, module: SpanMerger | None, matcher: Matcher | None
    ) -> None:
        if matcher is not None and len(matcher.rules) and module is None:
            raise GenerationError("rules need a merge module", None, "Pass one, or no rules.")
        check_attention_window(backbone.model.config, 1)
        self.backbone, self.module, self.matcher = backbone, module, matcher

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[NDArray[np.integer] | Sequence[int]],
        config: GenerationConfig,
        *,
        merge_prompt: bool = True,
        merge_decode: bool = True,
        seed: int = 0,
        observer: Observer | None = None,
    ) -> EngineOutput:
        """Generate a continuation of every prompt.

        Args:
            prompts: Raw ids per row [T_b], of any lengths, at least one token each.
            config: ``max_new_tokens`` and the settings named in ``sampling``; others are refused.
            merge_prompt: Whether prompts are compressed.
            merge_decode: Whether generated tokens are merged in the cache. No rule crosses from
                the prompt into the generated tokens.
            seed: For sampling.
            observer: Called after every forward.

        Returns:
            Raw ids, spans and cache lengths per row.

        Raises:
            GenerationError: If there is no prompt, a prompt is empty or holds an id outside the
                vocabulary, a setting is not supported, or prompt units and new tokens exceed the
                backbone's positions or attention window.
        """
        check_generation_config(config)
        assert config.max_new_tokens is not None  # noqa: S101  just checked
        rows_of_ids = [self._checked(b, ids) for b, ids in enumerate(prompts)]
        if not rows_of_ids:
            raise GenerationError("there must be at least one prompt", 0, "Pass one.")
        prompt_matcher = self.matcher if merge_prompt else None
        cuts = [segmentation(ids, prompt_matcher) for ids in rows_of_ids]
        packed = pack_rows(rows_of_ids, cuts, device=self.backbone.device)
        # The last token chosen is never fed.
        limit = int(packed.unit_counts.max()) + config.max_new_tokens - 1
        self._check_length(limit, config.max_new_tokens)
        rows = [_Row(ids.tolist(), len(ids)) for ids in rows_of_ids]
        units = GeneratedUnits(self.matcher if merge_decode else None, len(rows))
        chooser = TokenChooser(config, len(rows), seed)
        stopper = Stopper(config, self.backbone.tokenizer)
        layers = self.backbone.model.config.num_hidden_layers
        cache = RowCache(layers, len(rows), limit, self.backbone.device)

        logits = self._prefill(packed, cache)
        while True:
            for row, length in zip(rows, cache.lengths.tolist(), strict=True):
                if row.stop_reason is None:
                    row.cache_lengths.append(length)
            if observer is not None:
                observer(_snapshot(logits, cache, rows))
            tokens = self._choose(rows, chooser, stopper, logits)
            running = np.array([row.stop_reason is None for row in rows])
            if not running.any():
                break
            logits = self._feed(units.push(tokens, running), cache)
        prompt_spans = _spans(packed)
        return EngineOutput(
            tuple(_row_output(row, prompt_spans[b], units.spans(b)) for b, row in enumerate(rows))
        )

    def _checked(self, b: int, ids: NDArray[np.integer] | Sequence[int]) -> NDArray[np.int64]:
        array = np.asarray(ids)
        if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
            raise GenerationError(
                "a prompt must be a 1-D array of at least one token id",
                f"prompt {b}: shape {array.shape}, {array.dtype}",
                "Put a BOS token into an empty prompt.",
            )
        wide = array.astype(np.int64)
        if int(wide.min()) < 0 or int(wide.max()) >= self.backbone.vocab_size:
            raise GenerationError(
                f"ids must lie between 0 and {self.backbone.vocab_size - 1}",
                f"prompt {b}: {int(wide.min())} .. {int(wide.max())}",
                "Encode with the backbone's own tokenizer.",
            )
        return wide

    def _check_length(self, limit: int, new_tokens: int) -> None:
        positions = self.backbone.max_positions
        if positions is not None and limit > positions:
            raise GenerationError(
                f"prompt units and new tokens must fit the backbone's {positions} positions",
                f"{limit - new_tokens + 1} units + {new_tokens} new tokens",
                "Shorten the prompt or lower max_new_tokens.",
            )
        check_attention_window(self.backbone.model.config, limit)

    def _forward(self, embeddings: Tensor, cache: RowCache) -> Tensor:
        """Run W units per row [B, W, d] through the trunk on top of the cache: [B, W, d]."""
        cache.begin(embeddings.shape[1])
        out = self.backbone.model.base_model(
            inputs_embeds=embeddings,
            attention_mask=step_mask(cache, embeddings.dtype),
            position_ids=cache.positions,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        assert isinstance(out, Tensor)  # noqa: S101  every transformers trunk returns one
        return out

    def _prefill(self, packed: PackedUnits, cache: RowCache) -> Tensor:
        """Fill the cache with the prompts' units; return the logits after each row's last [B, V].

        Causal attention alone is right for right-padded rows: no unit looks at padding behind it.
        """
        hidden = self._forward(unit_embeddings(packed, self.backbone, self.module), cache)
        cache.commit(packed.unit_counts.cpu())
        last = packed.unit_counts - 1
        if bool((last == hidden.shape[1] - 1).all()):
            # A slice, as in transformers: a gather's other strides take another GEMM kernel and
            # change the last bit of the logits (seen on CPU, float32).
            return self.backbone.head(hidden[:, -1:])[:, 0]
        at_last = hidden[torch.arange(len(last), device=hidden.device), last]
        return self.backbone.head(at_last[:, None])[:, 0]

    def _choose(
        self, rows: Sequence[_Row], chooser: TokenChooser, stopper: Stopper, logits: Tensor
    ) -> NDArray[np.int64]:
        """Give every running row its next token and return the choice of all rows [B]."""
        tokens = chooser.choose(logits, [row.raw for row in rows])
        for row, token in zip(rows, tokens, strict=True):
            if row.stop_reason is None:
                row.raw.append(token)
                row.stop_reason = stopper.reason(row.raw, row.prompt_length)
        return np.array(tokens, dtype=np.int64)

    def _feed(self, step: Advance, cache: RowCache) -> Tensor:
        """Roll back, feed one unit per row, return the next logits [B, V]."""
        cache.rollback(torch.from_numpy(step.rollback))
        hidden = self._forward(self._step_embeddings(step), cache)
        cache.commit(torch.from_numpy(step.lengths > 0))
        return self.backbone.head(hidden)[:, 0]

    def _step_embeddings(self, step: Advance) -> Tensor:
        """Embed the unit of each row [B, 1, d]; an ended row is fed id 0."""
        device = self.backbone.device
        embeddings = self.backbone.embed(torch.from_numpy(step.spans[:, :1]).to(device))
        merged = np.flatnonzero(step.lengths > 1)
        if merged.size and self.module is not None:
            lengths = step.lengths[merged]
            spans = step.spans[merged, : lengths.max()]
            embeddings[torch.from_numpy(merged).to(device), 0] = surrogates(
                torch.from_numpy(spans).to(device),
                torch.from_numpy(lengths).to(device),
                self.backbone,
                self.module,
            )
        return embeddings


def _snapshot(logits: Tensor, cache: RowCache, rows: Sequence[_Row]) -> Forward:
    return Forward(
        logits=logits,
        lengths=cache.lengths.clone(),
        generated=tuple(row.ids for row in rows),
        running=torch.tensor([row.stop_reason is None for row in rows]),
    )


def _spans(packed: PackedUnits) -> list[Spans]:
    """Return the merged spans (start, length) of every packed row."""
    return [
        tuple((s, n) for s, n in zip(starts, lengths, strict=True) if n > 1)
        for starts, lengths in zip(packed.starts.tolist(), packed.lengths.tolist(), strict=True)
    ]


def _row_output(row: _Row, prompt_spans: Spans, generated_spans: Spans) -> RowOutput:
    assert row.stop_reason is not None  # noqa: S101  generate ends when all rows have
    return RowOutput(
        ids=row.ids,
        prompt_length=row.prompt_length,
        prompt_spans=prompt_spans,
        generated_spans=generated_spans,
        cache_lengths=tuple(row.cache_lengths),
        stop_reason=row.stop_reason,
    )
