"""Static KV buffers with one length per row, so that taking units back is a subtraction.

Three rows (x = valid state, - = stale or padding), before and after ``rollback([0, 2, 1])``::

    row 0   x x x x x - - -      length 5        x x x x x - - -      length 5
    row 1   x x x x - - - -      length 4   =>   x x - - - - - -      length 2
    row 2   x x x - - - - -      length 3        x x - - - - - -      length 2

A forward writes the states of its units at columns ``length .. length + width - 1`` of each row.
Attention gets the buffer up to the last column that any row wrote; ``attention_masks.step_mask``
hides what lies behind a row's own units.

Shapes: B rows, H key/value heads, L columns, D head size, W width (units per row and forward).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_FIRST_CAPACITY: Final = 64


@dataclass
class WritePlan:
    """Columns that the next forward writes; one object shared by all layers of a cache.

    Attributes:
        view: Columns handed to attention.
        uniform_start: The common first column when all rows agree, else None.
        rows: Row indices [B, 1] (int64).
        columns: Columns written [B, W] (int64).
    """

    view: int
    uniform_start: int | None
    rows: Tensor
    columns: Tensor


def _buffer(states: Tensor, rows: int, capacity: int) -> Tensor:
    """Return zeros [B, H, L, D] for states [_, H, _, D], which may be written in any mode."""
    _, heads, _, size = states.shape
    with torch.inference_mode(False):
        return states.new_zeros((rows, heads, capacity, size))


def _grown(old: Tensor, capacity: int) -> Tensor:
    new = _buffer(old, len(old), capacity)
    new[:, :, : old.shape[2]] = old
    return new


class RowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers' own
    """One layer's key and value buffers [B, H, L, D], allocated at the first update."""

    is_sliding = False

    def __init__(self, max_length: int, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' own
        self.max_length = max_length
        self.capacity = min(capacity, max_length)
        self.plan: WritePlan | None = None
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate zeroed buffers: a masked column has weight 0, and 0 x NaN would be NaN."""
        self.keys = _buffer(key_states, len(key_states), self.capacity)
        self.values = _buffer(value_states, len(value_states), self.capacity)
        self.is_initialized = True

    def reserve(self, columns: int) -> None:
        """Grow the buffers by doubling until they hold ``columns``; contents are kept."""
        if columns <= self.capacity:
            return
        capacity = self.capacity
        while capacity < columns:
            capacity = min(self.max_length, 2 * capacity)
        if self.keys is not None and self.values is not None:
            # Both before either is kept: memory may run out between them.
            self.keys, self.values = _grown(self.keys, capacity), _grown(self.values, capacity)
        self.capacity = capacity

    def copy_rows(self, sources: Sequence[tuple[RowLayer, int, int]]) -> None:
        """Copy rows of layers that hold states into the empty buffers, side by side."""
        self.reserve(max(columns for _, _, columns in sources))
        first = sources[0][0]
        assert first.keys is not None and first.values is not None  # noqa: S101  the caller's
        self.keys = _buffer(first.keys, len(sources), self.capacity)
        self.values = _buffer(first.values, len(sources), self.capacity)
        self.is_initialized = True
        for b, (source, row, columns) in enumerate(sources):
            assert source.keys is not None and source.values is not None  # noqa: S101
            self.keys[b, :, :columns] = source.keys[row, :, :columns]
            self.values[b, :, :columns] = source.values[row, :, :columns]

    def close_gap(self, row: int, first: int, columns: Tensor) -> None:
        """Move columns [K] (int64, rising) of a row to ``first`` and behind."""
        for buffer in (self.keys, self.values):
            if buffer is not None:
                buffer[row, :, first : first + len(columns)] = buffer[row][:, columns]  # a copy

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values [B, H, W, D] of W units per row; transformers' call.

        Returns:
            What attention may look at: views of the buffers [B, H, longest row + W, D]; no copy.
        """
        plan = self.plan
        assert plan is not None  # noqa: S101  RowCache.begin
        width = plan.columns.shape[1]
        assert key_states.shape[2] == width  # noqa: S101  fewer would be written several times
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None  # noqa: S101  just allocated
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            if plan.uniform_start is not None:
                buffer[:, :, plan.uniform_start : plan.view] = states
            else:  # the two index tensors come first in the result: [B, W, H, D]
                buffer[plan.rows, :, plan.columns] = states.transpose(1, 2)
        return self.keys[:, :, : plan.view], self.values[:, :, : plan.view]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the columns attention will see and the offset of the first (0)."""
        return (self.plan.view if self.plan else self.length + query_length), 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.max_length


class RowCache(Cache):
    """A transformers cache whose rows have their own lengths and roll back without a copy.

    The caller brackets every forward: ``begin(width)``, the model's forward with
    ``past_key_values=cache``, then ``commit(counts)`` with the units that each row really gained.
    ``lengths`` are the units held per row [B] (int64, on the CPU, where the matches are decided).
    """

    def __init__(
        self, num_layers: int, batch_size: int, max_length: int, device: torch.device | str = "cpu"
    ) -> None:
        self._rows = [RowLayer(max_length, _FIRST_CAPACITY) for _ in range(num_layers)]
        super().__init__(layers=list(self._rows))
        self.max_length = max_length
        self.device = torch.device(device)
        self.lengths = torch.zeros(batch_size, dtype=torch.int64)
        self._row_index = torch.arange(batch_size, device=self.device)[:, None]

    @property
    def plan(self) -> WritePlan:
        """Where the forward under way writes."""
        plan = self._rows[0].plan
        assert plan is not None  # noqa: S101  begin
        return plan

    def begin(self, width: int) -> None:
        """Plan the next forward: ``width`` units per row, right padding included."""
        longest = int(self.lengths.max())
        view = longest + width
        assert view <= self.max_length  # noqa: S101  who made or allowed it has counted
        uniform = bool((self.lengths == longest).all())
        if uniform:  # nothing need travel to the device
            columns = torch.arange(longest, view, device=self.device).expand(len(self.lengths), -1)
        else:
            starts = self.lengths.to(self.device)
            columns = starts[:, None] + torch.arange(width, device=self.device)
        start = longest if uniform else None
        plan = WritePlan(view, start, self._row_index, columns)
        for layer in self._rows:
            layer.reserve(view)
            layer.plan = plan
            layer.length = longest

    def commit(self, counts: Tensor) -> None:
        """Count the units that each row gained [B] (integers on the CPU, 0 .. width)."""
        self.lengths = self.lengths + counts.to(torch.int64)
        self._finish()

    def rollback(self, counts: Tensor) -> None:
        """Forget the last units of each row [B] (integers on the CPU): no state is moved."""
        self.lengths = self.lengths - counts.to(torch.int64)
        assert int(self.lengths.min()) >= 0  # noqa: S101  no row gives back more than it holds
        self._finish()

    def drop(self, columns: Sequence[Sequence[int]]) -> None:
        """Remove columns from each row [B][K_b], rising; those behind them move up.

        Their keys keep the positions that they were computed with. A row of which nothing goes is
        not touched; of the others, the columns behind the first one that goes are copied.
        """
        lengths = self.lengths.tolist()
        for row, gone in enumerate(columns):
            if gone:
                kept = sorted(set(range(gone[0], lengths[row])).difference(gone))
                source = torch.tensor(kept, dtype=torch.int64, device=self.device)
                for layer in self._rows:
                    layer.close_gap(row, gone[0], source)
        self._keep([length - len(gone) for length, gone in zip(lengths, columns, strict=True)])

    def allow(self, max_length: int) -> None:
        """Let the rows grow to at least so many columns; nothing is allocated yet."""
        self.max_length = max(self.max_length, max_length)
        for layer in self._rows:
            layer.max_length = self.max_length

    @classmethod
    def of_rows(
        cls, rows: Sequence[tuple[RowCache, int]], lengths: Sequence[int] | None = None
    ) -> RowCache:
        """Return a cache with copies of rows of other caches of the same model, side by side.

        ``lengths`` are the first columns that are copied of each; None for all.
        """
        first = rows[0][0]
        lengths = lengths or [int(cache.lengths[row]) for cache, row in rows]
        most = max(cache.max_length for cache, _ in rows)
        copy = cls(len(first._rows), len(rows), most, first.device)
        for number, layer in enumerate(copy._rows):
            sources = [(cache._rows[number], row) for cache, row in rows]
            layer.copy_rows([(*pair, n) for pair, n in zip(sources, lengths, strict=True)])
        copy._keep(lengths)
        return copy

    @property
    def bytes(self) -> int:
        buffers = [buffer for layer in self._rows for buffer in (layer.keys, layer.values)]
        return sum(buffer.nbytes for buffer in buffers if buffer is not None)

    def _keep(self, lengths: Sequence[int]) -> None:
        self.lengths = torch.tensor(lengths, dtype=torch.int64)
        self._finish()

    def _finish(self) -> None:
        longest = int(self.lengths.max())
        for layer in self._rows:
            layer.plan = None
            layer.length = longest
