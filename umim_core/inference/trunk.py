"""Forwards of units on top of a row cache: a prompt at once, then one unit per row.

Shapes: B rows, S prompt units of the longest row, W units per forward, d embedding size, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from umim_core.backbone.attention_masks import step_mask
from umim_core.backbone.row_cache import RowCache
from umim_core.merging.compressed import Compressed
from umim_core.merging.packing import PackedUnits, fill_units
from umim_core.merging.span_cache import SpanCache
from umim_core.rules.suffix import Advance


class CachedTrunk:
    """A backbone that reads units and keeps their states in a row cache.

    Args:
        compressed: The model.
    """

    def __init__(self, compressed: Compressed) -> None:
        self._backbone = compressed.backbone
        self._preserved = compressed.unit_positions == "preserved"
        self._spans = None if compressed.module is None else SpanCache(compressed)

    def _forward(self, embeddings: Tensor, cache: RowCache, positions: Tensor | None) -> Tensor:
        """Run W units per row [B, W, d] through the trunk on top of the cache: [B, W, d].

        ``begin`` was called; ``positions`` [B, W] are None where units take their columns'.
        """
        out = self._backbone.trunk(
            inputs_embeds=embeddings,
            attention_mask=step_mask(cache, embeddings.dtype),
            position_ids=cache.columns if positions is None else positions,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        assert isinstance(out, Tensor)  # noqa: S101  every transformers trunk returns one
        return out

    def prefill(self, packed: PackedUnits, cache: RowCache, past: Sequence[int]) -> Tensor:
        """Fill the cache with the prompts' units; return the logits after each row's last [B, V].

        Args:
            packed: The prompts.
            cache: Where they go.
            past: Raw tokens that each row holds already.
        """
        cache.begin(packed.token_ids.shape[1])
        if self._preserved:
            before = torch.tensor(past, device=self._backbone.device)[:, None]
            positions = packed.position_ids("preserved") + before
        else:  # padding takes its row's last position: its column may lie beyond the backbone's
            last_unit = cache.columns[:, :1] + packed.unit_counts[:, None] - 1
            positions = cache.columns.minimum(last_unit)
        hidden = self._forward(self._unit_embeddings(packed), cache, positions)
        cache.commit(packed.unit_counts.cpu())
        last = packed.unit_counts - 1
        if bool((last == hidden.shape[1] - 1).all()):
            # A slice, as in transformers: a gather's other strides take another GEMM kernel and
            # change the last bit of the logits (seen on CPU, float32).
            return self._backbone.head(hidden[:, -1:])[:, 0]
        at_last = hidden[torch.arange(len(last), device=hidden.device), last]
        return self._backbone.head(at_last[:, None])[:, 0]

    def _unit_embeddings(self, packed: PackedUnits) -> Tensor:
        """Embed the units of the prompts [B, S, d]."""
        if self._spans is None or not len(packed.span_ids):
            return self._backbone.embed(packed.token_ids)
        pooled = self._spans.merge(packed.span_ids, packed.span_lengths)
        return fill_units(packed, self._backbone, pooled)

    def feed(self, step: Advance, cache: RowCache, raw_lengths: Sequence[int]) -> Tensor:
        """Roll back, feed one unit per row, return the next logits [B, V].

        Args:
            step: What is taken back and fed.
            cache: The rows.
            raw_lengths: Raw tokens per row, the newest included.
        """
        if step.rollback.any():
            cache.rollback(torch.from_numpy(step.rollback))
        cache.begin(1)
        positions = None
        if self._preserved:
            fed = torch.tensor(raw_lengths, device=self._backbone.device) - 1
            positions = fed[:, None]
        hidden = self._forward(self._step_embeddings(step), cache, positions)
        cache.commit(torch.from_numpy(step.lengths > 0))
        return self._backbone.head(hidden)[:, 0]

    def _step_embeddings(self, step: Advance) -> Tensor:
        """Embed the unit of each row [B, 1, d]; an ended row is fed id 0."""
        device = self._backbone.device
        embeddings = self._backbone.embed(torch.from_numpy(step.spans[:, :1]).to(device))
        merged = np.flatnonzero(step.lengths > 1)
        if merged.size and self._spans is not None:
            pairs = zip(step.spans[merged].tolist(), step.lengths[merged].tolist(), strict=True)
            found = self._spans.find([tuple(ids[:n]) for ids, n in pairs])
            embeddings[torch.from_numpy(merged).to(device), 0] = found
        return embeddings
