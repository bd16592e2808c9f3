"""Packing: raw token rows and their units become rows of embeddings, spans replaced by surrogates.

Shapes: B rows, S units of the longest row, M different spans, N tokens of the longest span.

    ids      x1 x2 x3 x4        units   [x1] [x2 x3] [x4]
    starts    0  1  3           lengths  1     2      1       embeddings  e(x1)  z_23  e(x4)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umim_core.backbone.backbone import Backbone
from umim_core.config.form import UnitPositions
from umim_core.errors import CorpusError, require
from umim_core.rules.grams import MAX_LONGEST
from umim_core.text.token_ids import Ints

Segmentation = tuple[Ints, Ints]
_OF_UNITS: Final = ("token_ids", "span_index", "starts", "lengths")  # columns of a batch [B, S]


class Segmenter(Protocol):
    """Anything that cuts raw ids into units, as ``Matcher`` does by rules from left to right."""

    def segment(self, ids: NDArray[np.integer]) -> Segmentation:
        """Cut ids [T] into units of 1 to 16 tokens; see ``Matcher.segment``."""


@dataclass(frozen=True)
class PackedUnits:
    """A batch of rows cut into units, right-padded.

    Attributes:
        token_ids: [B, S] int64, the raw id where a unit is one token, 0 elsewhere.
        span_index: [B, S] int64, row of ``span_ids`` of a merged unit, -1 elsewhere.
        span_ids: [M, N] int64, the different spans of the batch, zero-padded.
        span_lengths: [M] int64, 2 .. N.
        starts: [B, S] int64, first raw position of a unit (0 for padding).
        lengths: [B, S] int64, raw tokens of a unit (0 for padding).
    """

    token_ids: Tensor
    span_index: Tensor
    span_ids: Tensor
    span_lengths: Tensor
    starts: Tensor
    lengths: Tensor

    @cached_property
    def attention_mask(self) -> Tensor:
        """Which places are units and no padding [B, S] (bool)."""
        return self.lengths > 0

    @cached_property
    def unit_counts(self) -> Tensor:
        """Units per row [B]."""
        return self.attention_mask.sum(dim=1)

    def take(self, rows: Tensor) -> PackedUnits:
        """Return some rows [R] (int64), trimmed to their longest; spans stay the batch's."""
        width = int(self.unit_counts[rows].max()) if len(rows) else 0
        units = {name: getattr(self, name)[rows, :width] for name in _OF_UNITS}
        return replace(self, **units)

    def position_ids(self, unit_positions: UnitPositions) -> Tensor:
        """Return the position of every unit in the backbone [B, S] (int64), rising along a row.

        Padding has its column's number if compact and 0 if preserved: never more than the highest
        position of a unit in the batch.
        """
        if unit_positions == "preserved":
            return self.ends
        columns = torch.arange(self.starts.shape[1], device=self.starts.device)
        return columns.expand_as(self.starts)

    @property
    def merged(self) -> Tensor:
        """Which units are spans [B, S] (bool)."""
        return self.lengths > 1

    @property
    def ends(self) -> Tensor:
        """Last raw position of a unit [B, S] (int64), 0 for padding."""
        return (self.starts + self.lengths - 1).clamp(min=0)

    @property
    def raw_counts(self) -> Tensor:
        """Raw tokens per row [B]."""
        return self.lengths.sum(dim=1)


def pack_rows(
    rows: Sequence[NDArray[np.integer]],
    segmentations: Sequence[Segmentation],
    device: torch.device | str = "cpu",
) -> PackedUnits:
    """Pack rows of raw ids [T_b] and their units (starts, lengths), which cover each row."""
    shape = (len(rows), max((len(starts) for starts, _ in segmentations), default=0))
    token_ids, starts, lengths = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    span_index = np.full(shape, -1, dtype=np.int64)
    keys: list[Ints] = []  # length and zero-padded ids of merged units
    for b, (ids, (row_starts, row_lengths)) in enumerate(zip(rows, segmentations, strict=True)):
        units = len(row_starts)
        ends = np.cumsum(row_lengths)
        covered = int(row_lengths.sum())
        least, most = row_lengths.min(initial=1), row_lengths.max(initial=1)
        fits = covered == len(ids) and np.array_equal(row_starts, ends - row_lengths)
        rule = f"units of 1 to {MAX_LONGEST} tokens must cover every token of their row once"
        value = f"{covered} of {len(ids)} tokens, in units of {least} to {most}"
        remedy = "Use the matcher's own segmentation."
        require(fits and 1 <= least <= most <= MAX_LONGEST, CorpusError, rule, value, remedy)
        starts[b, :units], lengths[b, :units] = row_starts, row_lengths
        raw = np.flatnonzero(row_lengths == 1)
        token_ids[b, raw] = ids[row_starts[raw]]
        merged = row_lengths > 1
        keys.append(unit_keys(ids, row_starts[merged], row_lengths[merged], MAX_LONGEST))
    every = np.concatenate([np.zeros((0, 1 + MAX_LONGEST), np.int64), *keys])
    width = int(every[:, 0].max(initial=1))
    unique, inverse = np.unique(every[:, : 1 + width], axis=0, return_inverse=True)
    span_index[lengths > 1] = inverse.reshape(-1)
    arrays = (token_ids, span_index, unique[:, 1:], unique[:, 0], starts, lengths)
    return PackedUnits(*(torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in arrays))


def unit_keys(ids: NDArray[np.integer], starts: Ints, sizes: Ints, width: int) -> Ints:
    """Return length and zero-padded ids [P, 1 + width] of units of a flat text [T]."""
    keys = np.zeros((len(starts), 1 + width), dtype=np.int64)
    keys[:, 0] = sizes
    for place in range(int(sizes.max(initial=0))):
        inside = sizes > place
        keys[inside, 1 + place] = ids[starts[inside] + place]
    return keys


def inside_spans(lengths: Tensor, width: int) -> Tensor:
    """Return which of ``width`` offsets lie in a span of each length: [M, width] (bool)."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def packed_embeddings(packed: PackedUnits, backbone: Backbone, pooled: Tensor) -> Tensor:
    """Return the embeddings of all real units, row after row, without padding [N, d].

    ``pooled`` are the surrogates [M, d] of ``packed.span_ids``, of any float type. Of a batch on
    the CPU only indices travel to the backbone's device, and nothing waits for it.
    """
    device, real = backbone.device, packed.attention_mask
    ids, spans = packed.token_ids[real], packed.span_index[real]
    merged = (spans >= 0).nonzero().view(-1)
    embeddings = backbone.embed(ids.to(device))
    surrogates = pooled[spans[merged].to(device)].to(embeddings.dtype)
    return embeddings.index_copy(0, merged.to(device), surrogates)
