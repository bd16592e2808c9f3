"""Alignment of compressed with raw predictions on held-out rows.

Source: paper, "Alignment Metrics"; the same aligned rows as in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from umim_core.backbone import Backbone
from umim_core.distill.metrics import AlignmentSums
from umim_core.distill.step import DistillModel
from umim_core.errors import EvaluationError
from umim_core.merging.compress import pack_rows
from umim_core.merging.module import MergeModule
from umim_core.merging.policies import UnitPositions
from umim_core.rules.matcher import Matcher

_HEAD_ROWS = 512  # rows whose logits are held at once


@dataclass(frozen=True)
class AlignmentResult:
    """What was measured.

    Attributes:
        means: Metric means over aligned rows (see ``umim_core.distill.metrics.METRICS``).
        aligned_rows: Number of aligned rows.
        token_reduction: (raw tokens - units) / raw tokens.
        spans_per_row: Merged spans per row of text.
    """

    means: dict[str, float]
    aligned_rows: int
    token_reduction: float
    spans_per_row: float

    def metrics(self) -> dict[str, float]:
        """Return all numbers by name."""
        return {
            **self.means,
            "aligned_rows": float(self.aligned_rows),
            "token_reduction": self.token_reduction,
            "spans_per_row": self.spans_per_row,
        }


@torch.no_grad()
def evaluate_alignment(
    rows: Sequence[NDArray[np.integer]],
    backbone: Backbone,
    module: MergeModule,
    matcher: Matcher,
    batch_size: int = 8,
    *,
    unit_positions: UnitPositions = "compact",
) -> AlignmentResult:
    """Compare next-token distributions on raw and on merged input.

    Args:
        rows: Raw ids per row [T_b].
        backbone: The frozen model.
        module: The merge module.
        matcher: The rules.
        batch_size: Rows per forward.
        unit_positions: Positions of units, as the module was trained.

    Raises:
        EvaluationError: If there is no row, or no rule matches in any row.
    """
    if not rows or batch_size < 1:
        raise EvaluationError(
            "alignment needs at least one row and a positive batch size",
            f"{len(rows)} rows, batch size {batch_size}",
            "Give held-out text of at least one segment.",
        )
    model = DistillModel(backbone, module, unit_positions=unit_positions)
    sums = AlignmentSums()
    raw = units = spans = 0
    for first in range(0, len(rows), batch_size):
        part = rows[first : first + batch_size]
        packed = pack_rows(part, [matcher.segment(row) for row in part])
        teacher, student = model.hidden_pairs(part, packed, model.surrogates(packed))
        for start in range(0, len(teacher), _HEAD_ROWS):
            rows_slice = slice(start, start + _HEAD_ROWS)
            sums.add(backbone.head(teacher[rows_slice]), backbone.head(student[rows_slice]))
        raw += int(packed.lengths.sum())
        units += int(packed.unit_counts.sum())
        spans += int((packed.lengths > 1).sum())
    if not sums.rows:
        raise EvaluationError(
            "some rule must match in the held-out rows",
            f"{len(rows)} rows without a match",
            "Use rules mined on similar text, or a lower tau.",
        )
    return AlignmentResult(sums.means(), sums.rows, (raw - units) / raw, spans / len(rows))
