"""Alignment metrics over aligned prediction rows.

Shapes: R rows, V vocabulary. All metrics are means over rows. Tokens are ranked by probability,
ties by id, in teacher and student, so that top1 = 1 exactly where the reciprocal rank is 1.

Source: paper, "Alignment Metrics"; Top-p divides by the smaller set.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
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
    first_t, first_s = _leading(log_t, 10), _leading(log_s, 10)
    return {
        "top1": (first_t[:, 0] == first_s[:, 0]).double(),
        "top3": top_k_overlap(first_t, first_s, 3),
        "top10": top_k_overlap(first_t, first_s, 10),
        "topp": top_p_overlap(log_t, log_s, TOP_P),
        "mrr": 1.0 / _rank(log_s, first_t[:, :1]).double(),
        "kl": row_divergence(p_t, log_t, log_s),
        "cross_entropy": -(p_t * log_s).sum(-1),
    }


def row_divergence(p_t: Tensor, log_t: Tensor, log_s: Tensor) -> Tensor:
    """Return KL(teacher || student) of each row [R] in nats.

    Args:
        p_t: Probabilities of the teacher [R, V].
        log_t: Their logarithms [R, V].
        log_s: Log-probabilities of the student [R, V].
    """
    return (p_t * (log_t - log_s)).sum(-1)


def _leading(log_p: Tensor, most: int) -> Tensor:
    """Return the first ids [R, at most ``most``] of each row's ranking, the rest not sorted."""
    most = min(most, log_p.shape[-1])
    values, ids = log_p.topk(min(most + 1, log_p.shape[-1]), dim=-1)
    ids = ids[:, :most].clone()
    tied = (values[:, 1:] == values[:, :-1]).any(-1)  # topk leaves their order open
    if bool(tied.any()):
        ids[tied] = log_p[tied].argsort(dim=-1, descending=True, stable=True)[:, :most]
    return ids


def _rank(log_p: Tensor, token: Tensor) -> Tensor:
    """Return the rank [R], from 1, of one token per row [R, 1]."""
    own = log_p.gather(1, token)
    earlier = torch.arange(log_p.shape[-1], device=log_p.device) < token
    return 1 + ((log_p > own) | ((log_p == own) & earlier)).sum(-1)


def top_k_overlap(first_t: Tensor, first_s: Tensor, k: int) -> Tensor:
    """Return |top-k of teacher and student in common| / k per row [R], from rankings [R, >= k]."""
    k = min(k, first_t.shape[-1])
    return (first_t[:, :k, None] == first_s[:, None, :k]).any(-1).sum(-1).double() / k


def top_p_overlap(log_t: Tensor, log_s: Tensor, p: float) -> Tensor:
    """Return the overlap of the smallest sets with mass p, divided by the smaller set [R]."""
    ours, theirs = _nucleus(log_t, p), _nucleus(log_s, p)
    common = (ours & theirs).sum(-1).double()
    return common / torch.minimum(ours.sum(-1), theirs.sum(-1)).double()


def _nucleus(log_p: Tensor, p: float) -> Tensor:
    """Return the membership mask [R, V] of the smallest set whose mass reaches p."""
    falling = _falling(log_p)
    mass = falling.exp().cumsum(dim=-1)
    before = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], dim=1)
    size = (before < p).sum(dim=-1, keepdim=True)
    least = falling.gather(1, size - 1)
    chosen = log_p >= least
    tied = (chosen.sum(dim=-1, keepdim=True) > size)[:, 0]  # of equal ones the first by id belong
    if bool(tied.any()):
        above, equal = log_p[tied] > least[tied], log_p[tied] == least[tied]
        room = size[tied] - above.sum(dim=-1, keepdim=True)
        chosen[tied] = above | (equal & (equal.cumsum(dim=-1) <= room))
    return chosen


def _falling(log_p: Tensor) -> Tensor:
    """Return each row's values [R, V] in falling order, without their places.

    On a CPU by numpy, ten times as fast as torch's sort, which carries the places along.
    """
    if log_p.device.type != "cpu":
        return log_p.sort(dim=-1, descending=True).values
    return torch.from_numpy(np.sort(log_p.numpy(), axis=-1)).flip(-1)
