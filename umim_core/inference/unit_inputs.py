"""States of units that the layers from the merge depth on are fed, while generating.

At depth 0 a unit is made of embeddings by its ids; above it, of the states that the layers below
give to its tokens, which pass them raw on top of a cache of their own.

Shapes: B rows, S prompt units of the longest row, W units per forward, d embedding size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umim_core.backbone.attention_masks import step_mask
from umim_core.backbone.backbone import Backbone
from umim_core.backbone.row_cache import RowCache
from umim_core.inference.prompts import Prompts
from umim_core.inference.unit_cache import UnitCache
from umim_core.merging.compressed import Compressed
from umim_core.merging.packing import PackedUnits, fill_units
from umim_core.merging.span_cache import SpanCache
from umim_core.rules.suffix import Advance


def run_layers(part: Backbone, states: Tensor, cache: RowCache, positions: Tensor | None) -> Tensor:
    """Run W units per row [B, W, d] through some layers on top of their cache: [B, W, d].

    ``begin`` was called; ``positions`` [B, W] are None where units take their columns'.
    """
    out = part.trunk(
        inputs_embeds=states,
        attention_mask=step_mask(cache, states.dtype),
        position_ids=cache.columns if positions is None else positions,
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    assert isinstance(out, Tensor)  # noqa: S101  every transformers trunk returns one
    return out


class UnitInputs:
    """Makes the states of prompts and of generated units."""

    def __init__(self, compressed: Compressed) -> None:
        self._compressed, self._backbone = compressed, compressed.backbone
        by_ids = compressed.module is not None and not compressed.merge_depth
        self._spans = SpanCache(compressed) if by_ids else None

    def of_prompts(self, prompts: Prompts, cache: UnitCache, past: Sequence[int]) -> Tensor:
        """Return the states of the prompts' units before the merge depth [B, S, d]."""
        lower, packed = self._compressed.trunk.lower, prompts.packed
        if lower is None or cache.raw is None:
            return self._unit_embeddings(packed)
        device, counts = self._backbone.device, packed.raw_counts
        width = int(counts.max())
        ids = torch.zeros(len(prompts.ids), width, dtype=torch.int64)
        for b, row in enumerate(prompts.ids):
            ids[b, : len(row)] = torch.from_numpy(row)
        ids = ids.to(device)
        before = torch.tensor(past, device=device)[:, None]
        columns = torch.arange(width, device=device)
        positions = before + torch.minimum(columns.expand_as(ids), counts[:, None] - 1)
        cache.raw.begin(width)
        states = run_layers(lower, self._backbone.embed(ids), cache.raw, positions)
        cache.raw.commit(counts.cpu())
        cache.remember(states, counts)
        return self._compressed.unit_states(packed, ids, states)

    def _unit_embeddings(self, packed: PackedUnits) -> Tensor:
        """Embed the units of the prompts [B, S, d]."""
        if self._spans is None or not len(packed.span_ids):
            return self._backbone.embed(packed.token_ids)
        pooled = self._spans.merge(packed.span_ids, packed.span_lengths)
        return fill_units(packed, self._backbone, pooled)

    def of_step(
        self,
        step: Advance,
        tokens: NDArray[np.int64],
        cache: UnitCache,
        positions: Tensor | None,
    ) -> Tensor:
        """Return the state of each row's newest unit before the merge depth [B, 1, d].

        Args:
            step: The units.
            tokens: The newest token of each row [B]; those of ended rows mean nothing.
            cache: Where the layers below the depth keep it.
            positions: Its position [B, 1] (int64); None where positions are columns.
        """
        lower = self._compressed.trunk.lower
        if lower is None or cache.raw is None:
            return self._step_embeddings(step)
        return self._step_states(step, tokens, cache, lower, positions)

    def _step_states(
        self,
        step: Advance,
        tokens: NDArray[np.int64],
        cache: UnitCache,
        lower: Backbone,
        positions: Tensor | None,
    ) -> Tensor:
        """Return the state of each row's unit before the merge depth [B, 1, d]."""
        running, device = torch.from_numpy(step.lengths > 0), self._backbone.device
        raw = cache.raw
        assert raw is not None and cache.recent is not None  # noqa: S101  prefilled
        fed = torch.from_numpy(np.where(step.lengths > 0, tokens, 0)).to(device)
        raw.begin(1)
        states = run_layers(lower, self._backbone.embed(fed[:, None]), raw, positions)
        raw.commit(running)
        window = torch.cat([cache.recent, states], dim=1)  # [B, 4, d], the newest last
        cache.remember(states, running.to(device, torch.int64))
        merged = np.flatnonzero(step.lengths > 1)
        if merged.size:
            rows, lengths = torch.from_numpy(merged).to(device), step.lengths[merged]
            states[rows, 0] = self._compressed.merge_states(
                window[rows], torch.from_numpy(step.spans[merged]).to(device), lengths
            )
        return states

    def _step_embeddings(self, step: Advance) -> Tensor:
        """Embed the unit of each row [B, 1, d]; an ended row is fed id 0."""
        device = self._backbone.device
        embeddings = self._backbone.embed(torch.from_numpy(step.spans[:, :1]).to(device))
        merged = np.flatnonzero(step.lengths > 1)
        if merged.size and self._spans is not None:
            pairs = zip(step.spans[merged].tolist(), step.lengths[merged].tolist(), strict=True)
            surrogates = self._spans.find([tuple(ids[:n]) for ids, n in pairs])
            embeddings[torch.from_numpy(merged).to(device), 0] = surrogates
        return embeddings
