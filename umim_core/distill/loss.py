"""Full-vocabulary distillation loss that never holds more than a chunk of logits.

Shapes: R aligned rows, d hidden size, V vocabulary, C rows per chunk.

    CE   = -(1/R) sum_r sum_v p_T(v) log p_S(v)         soft-target cross-entropy
    KL   = CE - H(p_T)
    grad = (p_S - p_T) W / R                            exact, since the head W is frozen

The gradient is formed in the forward pass, chunk by chunk, so memory is C V instead of 2 R V.

Source: paper, "Distillation Objective"; log-softmax takes the place of log(p + eps).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from umim_core.backbone import Backbone

DEFAULT_CHUNK = 1024


@dataclass(frozen=True)
class DistillLoss:
    """Sums over aligned rows; divide by the rows of the global batch.

    Attributes:
        cross_entropy: Sum over rows, nats; carries the gradient.
        kl: Sum over rows of KL(teacher || student), nats; no gradient.
        rows: Number of aligned rows.
    """

    cross_entropy: Tensor
    kl: Tensor
    rows: int


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, weight: Tensor, bias: Tensor | None, chunk: int
    ) -> tuple[Tensor, Tensor]:
        accumulate = torch.float64 if student.dtype is torch.float64 else torch.float32
        total = torch.zeros((), dtype=accumulate, device=student.device)
        divergence = torch.zeros_like(total)
        gradient = torch.empty_like(student) if ctx.needs_input_grad[0] else None
        for start in range(0, len(student), chunk):
            rows = slice(start, start + chunk)
            log_t = F.linear(teacher[rows], weight, bias).to(accumulate).log_softmax(dim=-1)
            log_s = F.linear(student[rows], weight, bias).to(accumulate).log_softmax(dim=-1)
            p_t = log_t.exp()
            total -= (p_t * log_s).sum()
            divergence += (p_t * (log_t - log_s)).sum()
            if gradient is not None:
                gradient[rows] = (log_s.exp() - p_t).to(weight.dtype) @ weight
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(divergence)
        return total, divergence

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_total.to(gradient.dtype), None, None, None, None


def distill_loss(
    student: Tensor, teacher: Tensor, backbone: Backbone, chunk: int = DEFAULT_CHUNK
) -> DistillLoss:
    """Return the loss sums over aligned rows.

    Args:
        student: Hidden states of the student at the aligned rows [R, d]; carries the gradient.
        teacher: Hidden states of the teacher at the same rows [R, d].
        backbone: Supplies the frozen head.
        chunk: Rows C whose logits are held at once.

    Returns:
        Sums over the R rows; zero, and without NaN, for R = 0.
    """
    weight = backbone.head_weight.to(student.dtype)
    bias = None if backbone.head_bias is None else backbone.head_bias.to(student.dtype)
    total, divergence = _SoftCrossEntropy.apply(  # type: ignore[no-untyped-call]  # torch's own
        student, teacher.to(student.dtype), weight, bias, chunk
    )
    return DistillLoss(total, divergence, len(student))
