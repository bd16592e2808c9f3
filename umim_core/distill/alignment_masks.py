"""Alignment masks: the teacher row of each student row.

The paper's example, units x1 | x2 x3 | x4 | x5 x6::

    raw       x1 x2 x3 x4 x5 x6
    M^T        0  0  1  1  0  1      last raw token of every unit from the first merge on
    units     x1 z23 x4 z56
    M^S        0  1  1  1            the same units

Rows before the first merge are excluded: both paths compute the same there. A sequence without
merges contributes no row.

Decoding passes through every student state here, but which states of a text are rows depends on
what follows and on the rules; ``evaluation.alignment`` also measures all that it passes through.

Source: paper, "Mask Construction and Sequence Alignment".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from umim_core.merging.packing import PackedUnits


@dataclass(frozen=True)
class AlignedRows:
    """Indices of aligned predictions, in row-major order.

    Attributes:
        batch: Row of the batch [R] (int64).
        teacher: Raw position [R] whose next-token distribution is the target.
        student: Unit position [R] whose distribution is trained.
    """

    batch: Tensor
    teacher: Tensor
    student: Tensor

    def __len__(self) -> int:
        return len(self.batch)


def alignment_masks(packed: PackedUnits) -> tuple[Tensor, Tensor]:
    """Return the paper's masks M^T [B, T] and M^S [B, S] (bool), T the longest raw row."""
    merged = packed.lengths > 1
    student = packed.attention_mask & (merged.cumsum(dim=1) > 0)
    width = int(packed.raw_counts.max()) if len(packed.lengths) else 0
    teacher = torch.zeros(len(student), width, dtype=torch.bool, device=student.device)
    rows = _rows(packed, student)
    teacher[rows.batch, rows.teacher] = True
    return teacher, student


def aligned_rows(packed: PackedUnits, first: Tensor | None = None) -> AlignedRows:
    """Return the aligned (teacher, student) positions of a batch.

    Args:
        packed: Rows cut into units.
        first: Raw position [B] (int64) before which a row's units are left out, besides those
            before its first merge; None leaves out the latter alone.
    """
    student = packed.attention_mask & ((packed.lengths > 1).cumsum(dim=1) > 0)
    if first is not None:
        student &= packed.starts + packed.lengths > first[:, None]
    return _rows(packed, student)


def _rows(packed: PackedUnits, student: Tensor) -> AlignedRows:
    batch, unit = student.nonzero(as_tuple=True)
    last = packed.starts[batch, unit] + packed.lengths[batch, unit] - 1
    return AlignedRows(batch, last, unit)
