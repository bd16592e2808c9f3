"""States that reading a text passes through: its units merged, or whatever else a cache holds.

Perplexity and alignment are measured over these states, one per raw token. ``MergedStates`` are
those of merging; ``span_eviction`` has those of a cache that drops columns instead.

Shapes: B rows.
"""

from __future__ import annotations

from typing import Final, Protocol

from torch import Tensor

from umim_core.merging.branches import BranchLayout, branch_layout
from umim_core.merging.compressed import Compressed
from umim_core.merging.packing import PackedUnits


class ReadingStates(Protocol):
    """The states of rows that are read token by token."""

    def layout(self, packed: PackedUnits, compressed: Compressed) -> BranchLayout:
        """Lay the states of rows out for one forward."""
        ...

    def columns(self, packed: PackedUnits) -> Tensor:
        """Return the columns of a layer's KV cache once each row was read [B] (int64)."""
        ...


class MergedStates:
    """States of merging: one column per unit."""

    def layout(self, packed: PackedUnits, compressed: Compressed) -> BranchLayout:
        """Lay the states out; see ``branch_layout``."""
        return branch_layout(packed, compressed.matcher, compressed.unit_positions)

    def columns(self, packed: PackedUnits) -> Tensor:
        """Return the units of each row [B]."""
        return packed.unit_counts


MERGED: Final = MergedStates()
