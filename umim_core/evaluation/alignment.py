"""Alignment of compressed with raw predictions on held-out rows.

Two sets of rows, out of the same forwards. With the ids a b c d e and the rules (b, c), (d, e)::

    raw text           a    a b    a b c    a b c d    a b c d e
    compressed text    a    a b    a bc     a bc d     a bc de
    aligned rows                   x                   x           the paper's, as in training
    states                         x        x          x           all, from the first merge on

The paper's rows are the unit ends of the whole text. Decoding passes through each of them, but
which of a text's states are among them depends on what follows, and rule sets differ in it. The
states are all that decoding passes through (``merging.decode_states``), one per raw token, those
within a later span included: rule sets are compared over them.

Source: paper, "Alignment Metrics".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umim_core.backbone.backbone import Backbone
from umim_core.errors import EvaluationError, NumericalError
from umim_core.evaluation.alignment_metrics import METRICS, AlignmentSums, row_metrics
from umim_core.evaluation.paired_differences import ratio_error
from umim_core.merging.decode_states import BranchLayout, branch_layout
from umim_core.merging.likelihood import state_hidden
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.packing import PackedUnits

# Rows whose logits are held at once. Their memory is kept: mapped anew, a CPU clears all of it.
_HEAD_ROWS: Final = {"cpu": 128, "gpu": 512}
_HEAD_IDS: Final = 8192  # vocabulary entries whose weights are widened at once


@dataclass(frozen=True)
class AlignmentResult:
    """Alignment of UMIM with its base model."""

    means: dict[str, float]
    aligned_rows: int
    state_means: dict[str, float]
    state_rows: int
    token_reduction: float
    spans_per_row: float
    row_sums: dict[str, tuple[float, ...]]
    row_counts: tuple[int, ...]

    @property
    def errors(self) -> dict[str, float]:
        """Standard errors of ``means`` over the rows of text; nothing for a single row."""
        errors = {name: ratio_error(sums, self.row_counts) for name, sums in self.row_sums.items()}
        return {name: error for name, error in errors.items() if error is not None}

    def metrics(self) -> dict[str, float]:
        """Return all numbers by name; over states in ``_states``, standard errors in ``_se``."""
        return {
            **self.means,
            "aligned_rows": float(self.aligned_rows),
            **{f"{name}_states": mean for name, mean in self.state_means.items()},
            "state_rows": float(self.state_rows),
            "token_reduction": self.token_reduction,
            "spans_per_row": self.spans_per_row,
            **{f"{name}_se": error for name, error in self.errors.items()},
        }


@torch.no_grad()
def evaluate_alignment(
    rows: Sequence[NDArray[np.integer]],
    merged_model: MergedModel,
    batch_size: int = 8,
    base: Backbone | None = None,
) -> AlignmentResult:
    """Compare next-token distributions on raw and on merged input, or on an evicted cache.

    ``base`` reads the raw rows of ids [T_b]; the model's own backbone if None.
    """
    if not rows or batch_size < 1:
        raise EvaluationError(
            "alignment needs at least one row and a positive batch size",
            f"{len(rows)} rows, batch size {batch_size}",
            "Give held-out text of at least one segment.",
        )
    aligned, everywhere = AlignmentSums(), AlignmentSums()
    row_sums = np.zeros((len(rows), len(METRICS)))  # over the paper's rows of each row of text
    row_counts = np.zeros(len(rows), dtype=np.int64)
    raw = units = spans = 0
    for first in range(0, len(rows), batch_size):
        part = rows[first : first + batch_size]
        packed = merged_model.pack(part)
        pairs = _state_pairs(part, packed, merged_model, base or merged_model.backbone)
        for teacher, student, unit_end, of_row in pairs:
            values = row_metrics(teacher, student)
            everywhere.add(values)
            ends = {name: value[unit_end] for name, value in values.items()}
            aligned.add(ends)
            table = torch.stack([ends[name] for name in METRICS], dim=1)
            sums = table.new_zeros(len(part), len(METRICS)).index_add_(0, of_row[unit_end], table)
            row_sums[first : first + len(part)] += sums.cpu().numpy()
            counts = of_row[unit_end].bincount(minlength=len(part))
            row_counts[first : first + len(part)] += counts.cpu().numpy()
        raw += int(packed.lengths.sum())
        units += int(packed.unit_counts.sum())
        spans += int((packed.lengths > 1).sum())
    if not aligned.rows:
        raise EvaluationError(
            "some rule must match in the held-out rows",
            f"{len(rows)} rows without a match",
            "Use rules mined on similar text, or a lower tau.",
        )
    means, state_means = aligned.means(), everywhere.means()
    if not all(map(math.isfinite, state_means.values())):
        raise NumericalError(
            "every alignment metric must be finite", state_means, "Check the module's weights."
        )
    reduction = (raw - units) / raw
    return AlignmentResult(
        means,
        aligned.rows,
        state_means,
        everywhere.rows,
        reduction,
        spans / len(rows),
        {name: tuple(row_sums[:, i].tolist()) for i, name in enumerate(METRICS)},
        tuple(row_counts.tolist()),
    )


def _state_pairs(
    rows: Sequence[NDArray[np.integer]],
    packed: PackedUnits,
    merged_model: MergedModel,
    base: Backbone,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield logits after the states from the first merge on, as :func:`logit_pairs`.

    With them, whether each state is a unit's end [C], and the row of text that it is of [C].
    """
    layout = branch_layout(packed, merged_model.matcher, merged_model.unit_positions)
    merged = (layout.lengths > 1).cumsum(dim=1) > 0
    wanted = merged & (layout.lengths > 0)
    if not bool(wanted.any()):
        return
    unit_end, of_row = layout.trunk[wanted], wanted.nonzero()[:, 0]
    for teacher, student, chunk in logit_pairs(rows, layout, wanted, merged_model, base):
        yield teacher, student, unit_end[chunk], of_row[chunk]


def logit_pairs(
    rows: Sequence[NDArray[np.integer]],
    layout: BranchLayout,
    wanted: Tensor,
    merged_model: MergedModel,
    base: Backbone,
) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """Yield logits [C, V] on raw and on merged input, of the same places of a text, in chunks.

    They are at least float32: rounded to bfloat16 they tie. The next chunk overwrites them. The
    third value says which C of the wanted states [B, T] (bool) they are. ``base``, of the same
    vocabulary, reads the raw rows [T_b].
    """
    backbone = merged_model.backbone
    ids = np.zeros(tuple(layout.lengths.shape), dtype=np.int64)
    for b, row in enumerate(rows):
        ids[b, : len(row)] = row
    tokens = torch.from_numpy(ids).to(backbone.device)
    student = state_hidden(tokens, layout, merged_model)[wanted]
    teacher = base.hidden(base.embed(tokens))[wanted]  # causal: none sees padding
    most = _HEAD_ROWS["cpu" if tokens.device.type == "cpu" else "gpu"]
    wide = torch.promote_types(backbone.head_weight.dtype, torch.float32)
    pages = student.new_empty(2, min(most, len(student)), len(backbone.head_weight), dtype=wide)
    for first in range(0, len(student), most):
        chunk = slice(first, first + most)
        _fill_logits(teacher[chunk], base, pages[0])
        _fill_logits(student[chunk], backbone, pages[1])
        count = len(student[chunk])
        yield pages[0, :count], pages[1, :count], chunk


def _fill_logits(hidden: Tensor, backbone: Backbone, page: Tensor) -> None:
    """Write the logits of hidden states [C, d] to the first rows of ``page`` [>= C, V]."""
    weight, bias = backbone.head_weight, backbone.head_bias
    states, logits = hidden.to(page.dtype), page[: len(hidden)]
    step = len(weight) if weight.dtype == page.dtype else _HEAD_IDS
    for first in range(0, len(weight), step):
        part = slice(first, first + step)
        torch.mm(states, weight[part].to(page.dtype).T, out=logits[:, part])
    if bias is not None:
        logits += bias
