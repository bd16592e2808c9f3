"""One layer's static KV buffers: what a forward writes, and columns that move.

Shapes: B rows, H key/value heads, L columns, D head size, W width (units per row and forward).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from umim_core.errors import GenerationError


@dataclass
class WritePlan:
    """Columns that the next forward writes; one object shared by all layers of a cache.

    Attributes:
        width: Units per row W.
        view: Columns handed to attention.
        uniform_start: The common first column when all rows agree, else None.
        rows: Row indices [B, 1] (int64).
        columns: Columns written [B, W] (int64).
    """

    width: int
    view: int
    uniform_start: int | None
    rows: Tensor
    columns: Tensor


class RowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers' own
    """One layer's key and value buffers [B, H, L, D], allocated at the first update."""

    is_croppable = True
    is_sliding = False

    def __init__(self, max_length: int, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' own
        self.max_length = max_length
        self.capacity = min(capacity, max_length)
        self.plan: WritePlan | None = None
        self.length = 0
        self.shared = False  # the buffers are another layer's, until something is written

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate zeroed buffers: a masked column has weight 0, and 0 x NaN would be NaN."""
        self.keys = self._buffer(key_states)
        self.values = self._buffer(value_states)
        self.is_initialized = True

    def _buffer(self, states: Tensor) -> Tensor:
        batch, heads, _, size = states.shape
        return states.new_zeros((batch, heads, self.capacity, size))

    def reserve(self, columns: int) -> None:
        """Grow the buffers by doubling until they hold ``columns``; contents are kept.

        Shared buffers become the layer's own.
        """
        if columns <= self.capacity and not self.shared:
            return
        while self.capacity < columns:
            self.capacity = min(self.max_length, 2 * self.capacity)
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self._grown(self.keys), self._grown(self.values)
        self.shared = False

    def _grown(self, old: Tensor) -> Tensor:
        new = self._buffer(old)
        new[:, :, : old.shape[2]] = old
        return new

    def copy_rows(self, sources: Sequence[tuple[RowLayer, int, int]]) -> None:
        """Copy rows of layers that hold states into the empty buffers, side by side."""
        self.reserve(max(columns for _, _, columns in sources))
        first = sources[0][0]
        assert first.keys is not None and first.values is not None  # noqa: S101  the caller's
        shape = (len(sources), first.keys.shape[1], self.capacity)
        self.keys = first.keys.new_zeros((*shape, first.keys.shape[3]))
        self.values = first.values.new_zeros((*shape, first.values.shape[3]))
        self.is_initialized = True
        for b, (source, row, columns) in enumerate(sources):
            assert source.keys is not None and source.values is not None  # noqa: S101
            self.keys[b, :, :columns] = source.keys[row, :, :columns]
            self.values[b, :, :columns] = source.values[row, :, :columns]

    def fork(self, source: RowLayer, times: int) -> None:
        """Take over the only row of another layer some times; shared until something is written."""
        self.capacity = source.capacity
        if source.keys is not None and source.values is not None:
            self.keys = source.keys.expand(times, -1, -1, -1)
            self.values = source.values.expand(times, -1, -1, -1)
            self.is_initialized = self.shared = True

    def close_gap(self, row: int, first: int, columns: Tensor) -> None:
        """Move columns [K] (int64, rising) of a row to ``first`` and behind."""
        self.reserve(self.capacity)  # shared buffers become its own
        for buffer in (self.keys, self.values):
            if buffer is not None:
                buffer[row, :, first : first + len(columns)] = buffer[row][:, columns]  # a copy

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values [B, H, W, D] of W units per row; transformers' call.

        Returns:
            What attention may look at: views of the buffers [B, H, longest row + W, D]; no copy.

        Raises:
            GenerationError: If ``RowCache.begin`` was not called for this width.
        """
        plan = self.plan
        if plan is None or plan.width != key_states.shape[2]:
            raise GenerationError(
                "RowCache.begin(width) must come before each forward",
                f"{key_states.shape[2]} new columns, planned {plan and plan.width}",
                "Call begin, forward, then commit.",
            )
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None  # noqa: S101  just allocated
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            if plan.uniform_start is not None:
                end = plan.uniform_start + plan.width
                buffer[:, :, plan.uniform_start : end] = states
            else:  # the two index tensors come first in the result: [B, W, H, D]
                buffer[plan.rows, :, plan.columns] = states.transpose(1, 2)
        return self.keys[:, :, : plan.view], self.values[:, :, : plan.view]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the columns attention will see and the offset of the first (0)."""
        return (self.plan.view if self.plan else self.length + query_length), 0

    def get_seq_length(self) -> int:
        """Return the length of the longest row."""
        return self.length

    def get_max_length(self) -> int:
        """Return how many columns the buffers may grow to."""
        return self.max_length
