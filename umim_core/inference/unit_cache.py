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

import torch
from torch import Tensor

from umim_core.backbone.row_cache import RowCache
from umim_core.merging.merged_model import MergedModel


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

    def drop(self, columns: Sequence[Sequence[int]]) -> None:
        """Drop columns of raw tokens, by place: below the depth, or of all layers at depth 0."""
        (self.units if self.raw is None else self.raw).drop(columns)

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
