"""The KV cache of merged rows: columns of units, and below the merge depth columns of raw tokens.

    ids        x1 x2 x3 x4     units  [x1] [x2 x3] [x4]     merge depth 2
    layer 0    x1 x2 x3 x4     raw columns: they never merge, and age out by span eviction alone
    layer 1    x1 x2 x3 x4
    layer 2    x1 u23 x4       columns of units: rolled back where a rule ends
    ...
    recent     h2 h3 h4        states of the last tokens before layer 2, of which the next token's
                               unit may be made: as many as the longest rule has, less one

At depth 0 there are columns of units alone.

Shapes: B rows, d embedding size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umim_core.backbone.row_cache import RowCache
from umim_core.inference.prompts import Prompts
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.span_cache import SpanCache
from umim_core.rules.matcher import Advance


@dataclass
class UnitCache:
    """The columns of B rows.

    Attributes:
        units: Of the layers from the merge depth on.
        raw: Of the layers below it; None at depth 0.
        recent: States of each row's last tokens before the merge depth [B, reach, d]; None at
            depth 0 and before the first forward.
        reach: Tokens before the newest that its unit may hold.
    """

    units: RowCache
    raw: RowCache | None
    recent: Tensor | None
    reach: int

    @classmethod
    def empty(cls, merged_model: MergedModel, rows: int, units: int, raw: int) -> UnitCache:
        depth, device = merged_model.merge_depth, merged_model.backbone.device
        above = RowCache(merged_model.backbone.num_layers - depth, rows, units, device)
        below = RowCache(depth, rows, raw, device) if depth else None
        return cls(above, below, None, merged_model.longest - 1)

    @property
    def lengths(self) -> Tensor:
        """Units held per row [B] (int64, CPU)."""
        return self.units.lengths

    @property
    def evictable(self) -> RowCache:
        """Columns of raw tokens, which span eviction drops: below the depth, or all at depth 0."""
        return self.units if self.raw is None else self.raw

    def drop(self, columns: Sequence[Sequence[int]]) -> None:
        self.evictable.drop(columns)

    def repeated(self, times: int) -> UnitCache:
        """Return a cache with ``times`` equal rows, side by side, for each row of this one."""
        if times == 1:
            return self
        return UnitCache.of_rows(
            [(self, b) for b in range(len(self.lengths)) for _ in range(times)]
        )

    @classmethod
    def of_rows(
        cls, rows: Sequence[tuple[UnitCache, int]], first: tuple[int, int] | None = None
    ) -> UnitCache:
        """Return a cache with copies of rows of other caches of the same model, side by side.

        Of a row alone it may be the ``first`` units and raw tokens, without recent states.
        """
        kept_units, kept_raw = (None, None) if first is None else ([first[0]], [first[1]])
        units = RowCache.of_rows([(cache.units, row) for cache, row in rows], kept_units)
        below = [(cache.raw, row) for cache, row in rows if cache.raw is not None]
        states = [cache.recent[row] for cache, row in rows if cache.recent is not None]
        return cls(
            units,
            RowCache.of_rows(below, kept_raw) if below else None,
            torch.stack(states) if states and first is None else None,
            rows[0][0].reach,
        )

    @property
    def bytes(self) -> int:
        return self.units.bytes + (0 if self.raw is None else self.raw.bytes)

    def allow(self, units: int, raw: int) -> None:
        self.units.allow(units)
        if self.raw is not None:
            self.raw.allow(raw)

    def remember(self, states: Tensor, counts: Tensor) -> None:
        """Keep the states of each row's last tokens.

        Of the states just read, before the merge depth [B, T, d], right-padded, ``counts`` [B]
        (int64, on their device) are each row's.
        """
        known = self.recent
        if known is None:
            known = states.new_zeros(len(states), self.reach, states.shape[-1])
        joined = torch.cat([known, states], dim=1)
        places = counts[:, None] + torch.arange(self.reach, device=counts.device)
        self.recent = joined[torch.arange(len(joined), device=counts.device)[:, None], places]


class UnitInputs:
    """Makes the states of prompts and of generated units."""

    def __init__(self, merged_model: MergedModel) -> None:
        self._merged_model, self._backbone = merged_model, merged_model.backbone
        by_ids = merged_model.module is not None and not merged_model.merge_depth
        self._spans = SpanCache(merged_model) if by_ids else None

    def of_prompts(self, prompts: Prompts, cache: UnitCache, past: Sequence[int]) -> Tensor:
        """Return the states of the prompts' units before the merge depth [B, S, d]."""
        lower, packed = self._merged_model.trunk.lower, prompts.packed
        if lower is None or cache.raw is None:
            with torch.autocast(self._backbone.device.type, enabled=False):  # as those kept
                return self._merged_model.embed(packed)
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
        states = lower.on_cache(self._backbone.embed(ids), cache.raw, positions)
        cache.raw.commit(counts.cpu())
        cache.remember(states, counts)
        return self._merged_model.states_of(ids, states, packed.ends, packed.lengths)

    def of_step(
        self, step: Advance, tokens: NDArray[np.int64], cache: UnitCache, positions: Tensor | None
    ) -> Tensor:
        """Return the state of each row's newest unit before the merge depth [B, 1, d].

        The newest tokens [B] of ended rows mean nothing; their positions [B, 1] (int64) are None
        where they are columns.
        """
        lower = self._merged_model.trunk.lower
        if lower is None or cache.raw is None:
            return self._step_embeddings(step)
        running, device = torch.from_numpy(step.lengths > 0), self._backbone.device
        raw = cache.raw
        assert cache.recent is not None  # noqa: S101  prefilled
        fed = torch.from_numpy(np.where(step.lengths > 0, tokens, 0)).to(device)
        raw.begin(1)
        states = lower.on_cache(self._backbone.embed(fed[:, None]), raw, positions)
        raw.commit(running)
        window = torch.cat([cache.recent, states], dim=1)  # [B, reach + 1, d], the newest last
        cache.remember(states, running.to(device, torch.int64))
        merged = np.flatnonzero(step.lengths > 1)
        if merged.size:
            rows, lengths = torch.from_numpy(merged).to(device), step.lengths[merged]
            states[rows, 0] = self._merged_model.merge_states(
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
