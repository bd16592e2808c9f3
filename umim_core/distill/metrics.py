"""Alignment metrics over aligned prediction rows.

Shapes: R rows, V vocabulary. All metrics are means over rows.

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
    """Sums of the metrics over the rows seen so far; add batches, then take :meth:`means`."""

    rows: int = 0
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(METRICS, 0.0))

    def add(self, teacher: Tensor, student: Tensor) -> None:
        """Add rows.

        Args:
            teacher: Logits [R, V].
            student: Logits [R, V] of the same rows.
        """
        if not len(teacher):
            return
        log_t, log_s = teacher.double().log_softmax(-1), student.double().log_softmax(-1)
        p_t = log_t.exp()
        best = log_t.argmax(dim=-1, keepdim=True)
        rank = 1 + (log_s > log_s.gather(1, best)).sum(dim=-1)
        cross = -(p_t * log_s).sum()
        values = {
            "top1": (best.squeeze(1) == log_s.argmax(dim=-1)).sum(),
            "top3": top_k_overlap(log_t, log_s, 3).sum(),
            "top10": top_k_overlap(log_t, log_s, 10).sum(),
            "topp": top_p_overlap(log_t, log_s, TOP_P).sum(),
            "mrr": (1.0 / rank.double()).sum(),
            "kl": cross + (p_t * log_t).sum(),
            "cross_entropy": cross,
        }
        for name, value in values.items():
            self.sums[name] += float(value)
        self.rows += len(teacher)

    def means(self) -> dict[str, float]:
        """Return each metric's mean over the rows; NaN without rows."""
        return {
            name: total / self.rows if self.rows else float("nan")
            for name, total in self.sums.items()
        }


def top_k_overlap(log_t: Tensor, log_s: Tensor, k: int) -> Tensor:
    """Return |top-k of teacher and student in common| / k per row [R]."""
    k = min(k, log_t.shape[-1])
    ours, theirs = log_t.topk(k).indices, log_s.topk(k).indices
    return (ours[:, :, None] == theirs[:, None, :]).any(-1).sum(-1).double() / k


def top_p_overlap(log_t: Tensor, log_s: Tensor, p: float) -> Tensor:
    """Return the overlap of the smallest sets with mass p, divided by the smaller set [R]."""
    ours, theirs = _nucleus(log_t, p), _nucleus(log_s, p)
    common = (ours & theirs).sum(-1).double()
    return common / torch.minimum(ours.sum(-1), theirs.sum(-1)).double()


def _nucleus(log_p: Tensor, p: float) -> Tensor:
    """Return the membership mask [R, V] of the smallest set whose mass reaches p."""
    probs, order = log_p.exp().sort(dim=-1, descending=True, stable=True)
    before = probs.cumsum(dim=-1) - probs
    return torch.zeros_like(before, dtype=torch.bool).scatter(1, order, before < p)
