"""Every state that decoding passes through, as columns of one forward.

Decoding a text passes through the states segment(x_0), segment(x_0 x_1), ...: where a span is not
complete, its tokens so far stand as raw tokens, or as the smaller rules that they complete. Column
t holds the last unit of segment(x_0 .. x_t) and predicts x_{t+1}; it sees its predecessors alone.
With the ids a b c d e and the rules (b, c) and (b, c, d, e)::

    column t        0     1     2      3     4
    state           a     a b   a bc   a bc d  a bcde
    unit            a     b     z(bc)  d     z(bcde)
    part            trunk branch branch branch trunk     trunk: its unit ends in the whole text too
    predecessor     -     0     0      2     0           column t - tokens of the unit
    position        0     1     1      2     1           units of the state, less one

Matching is left to right, so what stands before a span of the whole text is the same in every state
within the span: a column's predecessors are trunk columns and branch columns of its own span, at
most as many as the span has tokens, less two. With preserved unit positions column t has the
position t.

No column depends on a later token. Were the whole text cut first and the tokens within a span left
raw, d would be predicted from a b c, a state chosen by looking at d and e.

Shapes: B rows, T raw tokens of the longest, M different spans, N tokens of the longest span.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from umim_core.backbone.attention_masks import additive_mask
from umim_core.config.form import UnitPositions
from umim_core.merging.packing import PackedUnits, unit_keys
from umim_core.rules.matcher import Matcher


@dataclass(frozen=True)
class BranchLayout:
    """Integer tables of a batch of rows (right-padded; padding columns are trunk).

    Attributes:
        trunk: Whether a column's unit is one of the whole row [B, T] (bool).
        lengths: Raw tokens of a column's unit [B, T] (int64), 0 for padding.
        positions: Position id of each column [B, T] (int64).
        surrogate: Row of ``span_ids`` that a column holds [B, T] (int64), -1 for raw tokens.
        span_ids: The different spans of all columns [M, N] (int64), zero-padded.
        span_lengths: Their tokens [M] (int64), 2 .. N.
    """

    trunk: Tensor
    lengths: Tensor
    positions: Tensor
    surrogate: Tensor
    span_ids: Tensor
    span_lengths: Tensor

    @property
    def plain(self) -> bool:
        """Whether all columns are trunk: rows of raw tokens under causal attention."""
        return bool(self.trunk.all())

    def mask(self, dtype: torch.dtype) -> Tensor:
        """Build the additive mask [B, 1, T, T] of a floating type.

        It is 0 where key j is query i, its predecessor, the predecessor's, and so on; the lowest
        finite value elsewhere.
        """
        columns = torch.arange(self.trunk.shape[1], device=self.trunk.device)
        causal = columns[None, :] <= columns[:, None]  # [T, T]
        allowed = causal & self.trunk[:, None, :]
        seen = columns.expand_as(self.lengths)
        # Itself and its predecessors within the longest span; those before are trunk.
        for _ in range(self.span_ids.shape[1] - 1):
            allowed.scatter_(2, seen[:, :, None], True)
            before = seen - self.lengths.gather(1, seen)
            seen = torch.where(before < 0, seen, before)
        return additive_mask(allowed, dtype)


def branch_layout(
    packed: PackedUnits, matcher: Matcher | None, unit_positions: UnitPositions
) -> BranchLayout:
    """Lay out rows of units for one forward over all states that decoding passes through.

    At least one row has a token. ``matcher`` is what cut them; None if all tokens are raw.
    """
    raw, device = packed.raw_counts, packed.starts.device
    width = int(raw.max())
    column = torch.arange(width, device=device).expand(len(raw), width)
    # A column's unit is the number of units that start at or before it, less one. Padding of the
    # unit axis starts nowhere (the row's end and beyond), so real columns never count it.
    units_axis = torch.arange(packed.starts.shape[1], device=device)
    real = units_axis < packed.unit_counts[:, None]
    starts = torch.where(real, packed.starts, width + 1)
    unit = torch.searchsorted(starts.contiguous(), column.contiguous(), right=True) - 1
    unit = unit.clamp(min=0)  # a row without tokens has no unit at all
    start, length = packed.starts.gather(1, unit), packed.lengths.gather(1, unit)
    padding = column >= raw[:, None]
    offset = (column - start).masked_fill(padding, 0)  # padding: as the first token of any span
    trunk = (offset == length - 1) | padding
    span = packed.span_index.gather(1, unit)
    lengths, units, surrogate, span_ids, span_lengths = _prefixes(packed, matcher)
    return BranchLayout(
        trunk=trunk,
        lengths=lengths[span, offset].masked_fill(padding, 0),
        positions=unit + units[span, offset] if unit_positions == "compact" else column,
        surrogate=surrogate[span, offset],
        span_ids=span_ids,
        span_lengths=span_lengths,
    )


def _prefixes(packed: PackedUnits, matcher: Matcher | None) -> Iterator[Tensor]:
    """Cut the prefixes of a batch's M spans: row m, entry k is the prefix of k + 1 tokens.

    The last row, M, stands for units of one raw token.

    Returns:
        Tokens of the prefix's last unit, units of the prefix less one, and the row of that last
        unit among some spans, -1 for a raw token [M + 1, N] each; those spans, which are the
        batch's and the smaller rules within them [M', N], and their tokens [M'].
    """
    spans, sizes = packed.span_ids.cpu().numpy(), packed.span_lengths.cpu().numpy()
    longest = spans.shape[1]
    lengths = np.ones((len(spans) + 1, longest), dtype=np.int64)
    units = np.tile(np.arange(longest), (len(spans) + 1, 1))  # raw tokens, one by one
    for size in range(2, longest):
        longer = np.flatnonzero(sizes > size)
        if matcher is not None and len(longer):
            borders = np.arange(len(longer) + 1, dtype=np.int64) * size
            prefixes = spans[longer, :size].reshape(-1)
            _, sizes_within, ends = matcher.segment_many(prefixes, borders)
            lengths[longer, size - 1] = sizes_within[ends[1:] - 1]  # of the last unit
            units[longer, size - 1] = np.diff(ends) - 1
    complete = np.arange(len(spans)), sizes - 1
    lengths[complete], units[complete] = sizes, 0
    units[-1] = 0
    row, last = (lengths > 1).nonzero()
    sizes = lengths[row, last]
    keys = unit_keys(spans.reshape(-1), row * longest + last - sizes + 1, sizes, longest)
    unique, inverse = np.unique(keys, axis=0, return_inverse=True)
    surrogate = np.full_like(lengths, -1)
    surrogate[row, last] = inverse.reshape(-1)
    widest = int(unique[:, 0].max(initial=1))
    parts = (lengths, units, surrogate, unique[:, 1 : 1 + widest].copy(), unique[:, 0].copy())
    return (torch.from_numpy(part).to(packed.starts.device) for part in parts)
