"""The KV cache of merged rows: columns of units, and below the merge depth columns of raw tokens.

    ids        x1 x2 x3 x4     units  [x1] [x2 x3] [x4]     merge depth 2
    layer 0    x1 x2 x3 x4     raw columns: they never merge, and age out by span eviction alone
    layer 1    x1 x2 x3 x4
    layer 2    x1 u23 x4       columns of units: rolled back where a rule ends
    ...
    recent     h2 h3 h4        states of the last three tokens before layer 2, of which the next
                               token's unit may be made

At depth 0 there are columns of units alone.

Shapes: B rows, d embedding size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from umim_core.backbone.row_cache import RowCache
from umim_core.rules.grams import ORDERS

REACH: Final = ORDERS[-1] - 1  # tokens before the newest that its unit may hold


@dataclass(frozen=True)
class CacheMark:
    """Lengths and recent states of a cache, to which it can go back."""

    units: tuple[int, ...]
    raw: tuple[int, ...]
    recent: Tensor | None


@dataclass
class UnitCache:
    """The columns of B rows.

    Attributes:
        units: Of the layers from the merge depth on.
        raw: Of the layers below it; None at depth 0.
        recent: States of each row's last three tokens before the merge depth [B, 3, d]; None at
            depth 0 and before the first forward.
    """

    units: RowCache
    raw: RowCache | None = None
    recent: Tensor | None = None

    @property
    def lengths(self) -> Tensor:
        """Units held per row [B] (int64, CPU)."""
        return self.units.lengths

    @property
    def evictable(self) -> RowCache:
        """Columns of raw tokens, which span eviction drops: below the depth, or all at depth 0."""
        return self.units if self.raw is None else self.raw

    def repeated(self, times: int) -> UnitCache:
        """Return a cache with ``times`` equal rows, side by side, for each row of this one."""
        if times == 1:
            return self
        return UnitCache.of_rows(
            [(self, b) for b in range(len(self.lengths)) for _ in range(times)]
        )

    @classmethod
    def of_rows(cls, rows: Sequence[tuple[UnitCache, int]]) -> UnitCache:
        """Return a cache with copies of rows of other caches of the same model, side by side."""
        units = RowCache.of_rows([(cache.units, row) for cache, row in rows])
        below = [(cache.raw, row) for cache, row in rows if cache.raw is not None]
        states = [cache.recent[row] for cache, row in rows if cache.recent is not None]
        return cls(
            units,
            RowCache.of_rows(below) if below else None,
            torch.stack(states) if states else None,
        )

    def cut(self, units: int, raw: int) -> None:
        """Keep the first columns of a cache of one row; the states of recent tokens go."""
        self.restore(CacheMark((units,), (raw,), None))

    @property
    def bytes(self) -> int:
        """Bytes that the columns take."""
        return self.units.bytes + (0 if self.raw is None else self.raw.bytes)

    def forked(self, times: int) -> UnitCache:
        """Return a cache of some rows that begin as the only row of this one; see ``RowCache``."""
        raw = None if self.raw is None else self.raw.forked(times)
        recent = None if self.recent is None else self.recent.repeat_interleave(times, dim=0)
        return UnitCache(self.units.forked(times), raw, recent)

    def allow(self, units: int, raw: int) -> None:
        """Let the rows grow to at least so many columns."""
        self.units.allow(units)
        if self.raw is not None:
            self.raw.allow(raw)

    def mark(self) -> CacheMark:
        """Return where the cache stands."""
        raw = () if self.raw is None else tuple(self.raw.lengths.tolist())
        return CacheMark(tuple(self.units.lengths.tolist()), raw, self.recent)

    def restore(self, mark: CacheMark) -> None:
        """Go back to an earlier mark; what was written behind it is forgotten."""
        self.units.restore(mark.units)
        if self.raw is not None:
            self.raw.restore(mark.raw)
        self.recent = mark.recent

    def remember(self, states: Tensor, counts: Tensor) -> None:
        """Keep the states of each row's last three tokens.

        Args:
            states: States of the tokens just read, before the merge depth [B, T, d]; right-padded.
            counts: Of them, how many are each row's [B] (int64, on the device of ``states``).
        """
        known = self.recent
        if known is None:
            known = states.new_zeros(len(states), REACH, states.shape[-1])
        joined = torch.cat([known, states], dim=1)
        places = counts[:, None] + torch.arange(REACH, device=counts.device)
        self.recent = joined[torch.arange(len(joined), device=counts.device)[:, None], places]


def new_cache(
    layers: Sequence[int], rows: int, units: int, raw: int, device: torch.device
) -> UnitCache:
    """Return an empty cache."""
    above, below = layers
    columns = RowCache(below, rows, raw, device) if below else None
    return UnitCache(RowCache(above, rows, units, device), columns)
