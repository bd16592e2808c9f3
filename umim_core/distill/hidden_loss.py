"""Hidden-state terms of the distillation loss, next to its cross-entropy.

Shapes: R aligned rows, d hidden size, L layers of a term, B sequences.

    term = sum over rows r of (1/L) sum_l (1/d) sum_i D((h_S - h_T)[r, l, i] / s[b(r), l])

h are hidden states at aligned rows: the student's at a unit, the teacher's at its last raw token. s
is the standard deviation of the teacher's states of layer l over the term's rows of the sequence b
that r belongs to. A sequence has its own, so that neither micro-batches nor the number of workers
change the loss. A layer whose states are large counts as much as the others.

Memory: states of the teacher, of the student and their difference, 3 L R d numbers of at least
float32 in a micro-batch: 4 rows of 512 tokens of SmolLM2-135M (L = 30, d = 576) have at most
2,048 aligned rows, 3 x 142 MB. A term of the last layer has 1 / 30 of that.

Source: CompLLM, 2025 (smooth L1 on every layer, divided by the teacher's standard deviation);
Token Distillation, ICLR 2026 (squared error at the positions that attend to the new embedding).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from umim_core.config.hidden_term import Distance, HiddenTerm, TermRows

# Stands for a standard deviation of zero: states that are all equal, in tests and nowhere else.
_LEAST: Final = 1e-12


@dataclass(frozen=True)
class AlignedStates:
    """Hidden states of a micro-batch at its aligned rows.

    Attributes:
        teacher: States [R, d] of every layer asked for, the last after the final norm.
        student: The same of the student; they carry the gradient.
        batch: Sequence of every row [R] (int64), in 0 .. B - 1.
        raw: Whether a row's unit is a raw token [R] (bool), not a surrogate.
    """

    teacher: tuple[Tensor, ...]
    student: tuple[Tensor, ...]
    batch: Tensor
    raw: Tensor


def hidden_term(states: AlignedStates, term: HiddenTerm) -> Tensor:
    """Return a term's sum over its rows; unweighted, and zero where it has none.

    Args:
        states: Of all layers if the term is of ``all``.
        term: Layers, distance and rows; the weight is the caller's.
    """
    chosen = _chosen(states, term.rows)
    batch = states.batch[chosen]
    layers = slice(None) if term.layers == "all" else slice(-1, None)
    pairs = list(zip(states.student[layers], states.teacher[layers], strict=True))
    sums = [_layer(student[chosen], teacher[chosen], batch, term) for student, teacher in pairs]
    return torch.stack(sums).sum() / len(sums)


def _chosen(states: AlignedStates, rows: TermRows) -> Tensor:
    """Return the numbers of a term's rows [R'] (int64)."""
    all_rows = torch.arange(len(states.batch), device=states.batch.device)
    return all_rows[states.raw] if rows == "attending" else all_rows


def _layer(student: Tensor, teacher: Tensor, batch: Tensor, term: HiddenTerm) -> Tensor:
    wide = torch.promote_types(teacher.dtype, torch.float32)
    teacher = teacher.to(wide)
    error = (student.to(wide) - teacher) / deviations(teacher, batch)[:, None]
    return _distance(error, term.distance) / error.shape[1]


def _distance(error: Tensor, distance: Distance) -> Tensor:
    """Return the sum of a distance; autograd keeps the error alone."""
    if distance == "mse":
        return error.square().sum()
    zero = error.new_zeros(()).expand_as(error)  # takes no memory
    return F.smooth_l1_loss(error, zero, reduction="sum")


def deviations(states: Tensor, batch: Tensor) -> Tensor:
    """Return, for every row, the standard deviation of all states of its sequence.

    Two rows of one sequence, [1, 3] and [5, 7]: mean 4, deviations -3, -1, 1, 3, so sqrt(5) each.

    Args:
        states: [R, d].
        batch: Sequence of every row [R] (int64).

    Returns:
        [R], of the rows and the hidden size together, above 0.
    """
    size = int(batch.max()) + 1 if len(batch) else 0
    counts = torch.bincount(batch, minlength=size).clamp(min=1)[batch]

    def mean(values: Tensor) -> Tensor:
        return states.new_zeros(size).index_add(0, batch, values.mean(dim=1))[batch] / counts

    variance = mean((states - mean(states)[:, None]).square())
    return variance.sqrt().clamp(min=_LEAST)
