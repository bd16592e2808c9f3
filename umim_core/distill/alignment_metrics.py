"""Alignment metrics over aligned prediction rows.

Shapes: R rows, V vocabulary. All metrics are means over rows. Tokens are ranked by probability,
ties by id, in teacher and student, so that top1 = 1 exactly where the reciprocal rank is 1.

Source: paper, "Alignment Metrics"; Top-p divides by the smaller set.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

METRICS = ("top1", "top3", "top10", "topp", "mrr", "kl", "cross_entropy")
TOP_P = 0.9


@dataclass
class AlignmentSums:
    """Sums of the metrics over the rows seen so far; add ``row_metrics``, then take means."""

    rows: int = 0
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(METRICS, 0.0))

    def add(self, values: dict[str, Tensor]) -> None:
        """Add rows: every metric's values [R], as ``row_metrics`` gives them."""
        for name in METRICS:
            self.sums[name] += float(values[name].sum())
        self.rows += len(values[METRICS[0]])

    def means(self) -> dict[str, float]:
        """Return each metric's mean over the rows; NaN without rows."""
        return {
            name: total / self.rows if self.rows else float("nan")
            for name, total in self.sums.items()
        }


def row_metrics(teacher: Tensor, student: Tensor) -> dict[str, Tensor]:
    """Return every metric of each row [R] (float64).

    Args:
        teacher: Logits [R, V], at least float32: rounded logits tie where the model does not.
        student: Logits [R, V] of the same rows.
    """
    if not len(teacher):
        return dict.fromkeys(METRICS, torch.zeros(0, dtype=torch.float64))
    log_t, log_s = teacher.double().log_softmax(-1), student.double().log_softmax(-1)
    p_t = log_t.exp()
    order_t, order_s = _ranking(log_t), _ranking(log_s)
    rank = 1 + (order_s == order_t[:, :1]).int().argmax(dim=-1)
    return {
        "top1": (order_t[:, 0] == order_s[:, 0]).double(),
        "top3": top_k_overlap(order_t, order_s, 3),
        "top10": top_k_overlap(order_t, order_s, 10),
        "topp": top_p_overlap(log_t, log_s, order_t, order_s, TOP_P),
        "mrr": 1.0 / rank.double(),
        "kl": (p_t * (log_t - log_s)).sum(-1),
        "cross_entropy": -(p_t * log_s).sum(-1),
    }


def _ranking(log_p: Tensor) -> Tensor:
    """Return token ids [R, V] by falling probability, ties by id."""
    return log_p.argsort(dim=-1, descending=True, stable=True)


def top_k_overlap(order_t: Tensor, order_s: Tensor, k: int) -> Tensor:
    """Return |top-k of teacher and student in common| / k per row [R], from rankings [R, V]."""
    k = min(k, order_t.shape[-1])
    return (order_t[:, :k, None] == order_s[:, None, :k]).any(-1).sum(-1).double() / k


def top_p_overlap(
    log_t: Tensor, log_s: Tensor, order_t: Tensor, order_s: Tensor, p: float
) -> Tensor:
    """Return the overlap of the smallest sets with mass p, divided by the smaller set [R]."""
    ours, theirs = _nucleus(log_t, order_t, p), _nucleus(log_s, order_s, p)
    common = (ours & theirs).sum(-1).double()
    return common / torch.minimum(ours.sum(-1), theirs.sum(-1)).double()


def _nucleus(log_p: Tensor, order: Tensor, p: float) -> Tensor:
    """Return the membership mask [R, V] of the smallest set whose mass reaches p."""
    mass = log_p.exp().gather(1, order).cumsum(dim=-1)
    before = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], dim=1)
    return torch.zeros_like(mass, dtype=torch.bool).scatter(1, order, before < p)
