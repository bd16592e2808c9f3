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
from umim_core.merging.generated import GeneratedUnits, Step
from umim_core.merging.outputs import EngineOutput, Forward, Observer, RowOutput, Spans
from umim_core.merging.sampling import Stopper, StopReason, TokenChooser, check_generation_config
from umim_core.rules.matcher import Matcher


@dataclass
class _Row:
    """State of one row under way."""

    raw: list[int]  # prompt and generated ids
    prompt_length: int
    units: GeneratedUnits
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
        matcher = self.matcher if merge_decode else None
        rows = [_Row(ids.tolist(), len(ids), GeneratedUnits(matcher)) for ids in rows_of_ids]
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
            steps = self._choose(rows, chooser, stopper, logits)
            if all(step is None for step in steps):
                break
            logits = self._feed(steps, cache)
        return EngineOutput(
            tuple(_row_output(row, spans) for row, spans in zip(rows, _spans(packed), strict=True))
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
    ) -> list[Step | None]:
        """Give every running row its next token; return what to feed, None for ended rows."""
        tokens = chooser.choose(logits, [row.raw for row in rows])
        steps: list[Step | None] = []
        for row, token in zip(rows, tokens, strict=True):
            if row.stop_reason is None:
                row.raw.append(token)
                row.stop_reason = stopper.reason(row.raw, row.prompt_length)
            steps.append(row.units.push(token) if row.stop_reason is None else None)
        return steps

    def _feed(self, steps: Sequence[Step | None], cache: RowCache) -> Tensor:
        """Roll back, feed one unit per row, return the next logits [B, V]."""
        cache.rollback(torch.tensor([step.rollback if step else 0 for step in steps]))
        hidden = self._forward(self._step_embeddings(steps), cache)
        cache.commit(torch.tensor([step is not None for step in steps]))
        return self.backbone.head(hidden)[:, 0]

    def _step_embeddings(self, steps: Sequence[Step | None]) -> Tensor:
        """Embed the unit of each row [B, 1, d]; an ended row is fed id 0."""
        device = self.backbone.device
        newest = [step.span[-1] if step else 0 for step in steps]
        embeddings = self.backbone.embed(torch.tensor(newest, device=device)[:, None])
        merged = [b for b, step in enumerate(steps) if step and len(step.span) > 1]
        if merged and self.module is not None:
            spans = [step.span for step in steps if step and len(step.span) > 1]
            width = max(map(len, spans))
            padded = [[*span, *[0] * (width - len(span))] for span in spans]
            embeddings[merged, 0] = surrogates(
                torch.tensor(padded, device=device),
                torch.tensor([len(span) for span in spans], device=device),
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


def _row_output(row: _Row, prompt_spans: Spans) -> RowOutput:
    assert row.stop_reason is not None  # noqa: S101  generate ends when all rows have
    return RowOutput(
        ids=row.ids,
        prompt_length=row.prompt_length,
        prompt_spans=prompt_spans,
        generated_spans=row.units.spans,
        cache_lengths=tuple(row.cache_lengths),
        stop_reason=row.stop_reason,
    )
