"""Alignment metrics over aligned prediction rows.

Shapes: R rows, C rows of a block, V vocabulary. All metrics are means over rows. Tokens are ranked
by logit, ties by id, in teacher and student, so that top1 = 1 exactly where the reciprocal rank
is 1. Ranks are those of the logits as they are; whatever is added up is float64.

On a CPU rows are measured in blocks that stay in a core's cache, in buffers that are kept for all
of them: mapping new ones took 40 % of the time.

Source: paper, "Alignment Metrics"; Top-p divides by the smaller set.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import Tensor

METRICS = ("top1", "top3", "top10", "topp", "mrr", "kl", "cross_entropy")
TOP_P = 0.9
_LARGEST: Final = 2048  # logits that are sorted for the nucleus; few rows need more
_BLOCK_BYTES: Final = 2 << 20  # one of three float64 buffers of a block on a CPU


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
        return {
            name: total / self.rows if self.rows else float("nan")
            for name, total in self.sums.items()
        }


def row_metrics(teacher: Tensor, student: Tensor) -> dict[str, Tensor]:
    """Return every metric of each row [R] (float64) of logits [R, V] of teacher and student.

    The teacher's are at least float32: rounded logits tie where the model does not.
    """
    parts = [
        _block_metrics(t, s, _row_sums(t, s, room)) for t, s, room in _blocks(teacher, student)
    ]
    nothing = torch.zeros(0, dtype=torch.float64, device=teacher.device)
    return {name: torch.cat([nothing, *(part[name] for part in parts)]) for name in METRICS}


def row_divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Return KL(teacher || student) of each row [R] of logits [R, V], in nats (float64)."""
    parts = [_row_sums(t, s, room).kl for t, s, room in _blocks(teacher, student)]
    return torch.cat([torch.zeros(0, dtype=torch.float64, device=teacher.device), *parts])


def _blocks(teacher: Tensor, student: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield logits of teacher and student [C, V], and room [3, C, V] (float64) for their sums."""
    rows, vocab = teacher.shape
    block = max(1, _BLOCK_BYTES // (8 * vocab) if teacher.device.type == "cpu" else rows)
    room = teacher.new_empty(3, min(block, rows), vocab, dtype=torch.float64)
    for part_t, part_s in zip(
        torch.split(teacher, block), torch.split(student, block), strict=True
    ):
        yield part_t, part_s, room[:, : len(part_t)]


@dataclass(frozen=True)
class _RowSums:
    """Sums over the vocabulary of each row [C]: log of the sum of exp(logit), KL, cross-entropy."""

    log_sum_t: Tensor
    log_sum_s: Tensor
    kl: Tensor
    cross_entropy: Tensor


def _row_sums(teacher: Tensor, student: Tensor, room: Tensor) -> _RowSums:
    """Return the sums of a block of logits [C, V]; ``room`` [3, C, V] is overwritten."""
    below_t, below_s, weights = room.unbind()  # logits, less the largest of their row
    top_t, top_s = (part.amax(dim=-1, keepdim=True).double() for part in (teacher, student))
    below_t.copy_(teacher).sub_(top_t)
    below_s.copy_(student).sub_(top_s)
    log_s = torch.exp(below_s, out=weights).sum(dim=-1).log_()
    mass = torch.exp(below_t, out=weights).sum(dim=-1)
    log_t = mass.log()
    # The difference first: near equal rows, the difference of two entropies would lose it.
    kl = below_t.sub_(below_s).mul_(weights).sum(dim=-1).div_(mass) - (log_t - log_s)
    cross_entropy = log_s - below_s.mul_(weights).sum(dim=-1).div_(mass)
    return _RowSums(log_t + top_t[:, 0], log_s + top_s[:, 0], kl, cross_entropy)


def _block_metrics(teacher: Tensor, student: Tensor, sums: _RowSums) -> dict[str, Tensor]:
    first_t, first_s = _leading(teacher, 10), _leading(student, 10)
    nucleus_t, size_t = _nucleus(teacher, sums.log_sum_t, TOP_P)
    nucleus_s, size_s = _nucleus(student, sums.log_sum_s, TOP_P)
    both = nucleus_t & nucleus_s
    return {
        "top1": (first_t[:, 0] == first_s[:, 0]).double(),
        "top3": top_k_overlap(first_t, first_s, 3),
        "top10": top_k_overlap(first_t, first_s, 10),
        "topp": _count(both).double() / torch.minimum(size_t, size_s).double(),
        "mrr": 1.0 / _rank(student, first_s, first_t[:, :1]).double(),
        "kl": sums.kl,
        "cross_entropy": sums.cross_entropy,
    }


def _leading(logits: Tensor, most: int) -> Tensor:
    """Return the first ids [C, at most ``most``] of each row's ranking."""
    most = min(most, logits.shape[-1])
    values, ids = logits.topk(min(most + 1, logits.shape[-1]), dim=-1)
    ids = ids[:, :most].clone()
    tied = (values[:, 1:] == values[:, :-1]).any(-1)  # topk leaves their order open
    if bool(tied.any()):
        ids[tied] = logits[tied].argsort(dim=-1, descending=True, stable=True)[:, :most]
    return ids


def _rank(logits: Tensor, first: Tensor, token: Tensor) -> Tensor:
    """Return the rank [C], from 1, of one token per row [C, 1]; ``first`` begins the ranking."""
    at = first == token
    rank = 1 + at.byte().argmax(dim=-1)
    far = ~at.any(dim=-1)
    if bool(far.any()):
        rest, wanted = logits[far], token[far]
        own = rest.gather(1, wanted)
        earlier = torch.arange(rest.shape[-1], device=rest.device) < wanted
        rank[far] = 1 + _count((rest > own) | ((rest == own) & earlier))
    return rank


def top_k_overlap(first_t: Tensor, first_s: Tensor, k: int) -> Tensor:
    """Return |top-k of teacher and student in common| / k per row [R], from rankings [R, >= k]."""
    k = min(k, first_t.shape[-1])
    return (first_t[:, :k, None] == first_s[:, None, :k]).any(-1).sum(-1).double() / k


def _nucleus(logits: Tensor, log_sum: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Return the smallest set whose mass reaches p, as a mask [C, V], and its size [C]."""
    size, least = _nucleus_border(logits, log_sum, p, _LARGEST)
    chosen = logits >= least[:, None]
    tied = _count(chosen) > size  # of equal ones the first by id belong
    if bool(tied.any()):
        rest, border = logits[tied], least[tied, None]
        above, equal = rest > border, rest == border
        room = (size[tied] - _count(above))[:, None]
        chosen[tied] = above | (equal & (equal.cumsum(dim=-1) <= room))
    return chosen, size


def _nucleus_border(logits: Tensor, log_sum: Tensor, p: float, most: int) -> tuple[Tensor, Tensor]:
    """Return size and smallest logit of each row's nucleus [C], sought in its ``most`` largest."""
    falling = _largest(logits, most)
    mass = (falling.double() - log_sum[:, None]).exp_().cumsum(dim=-1)
    size = 1 + (mass[:, :-1] < p).sum(dim=-1)
    least = falling.gather(1, size[:, None] - 1)[:, 0]
    short = mass[:, -1] < p
    if most < logits.shape[-1] and bool(short.any()):
        size[short], least[short] = _nucleus_border(
            logits[short], log_sum[short], p, logits.shape[-1]
        )
    return size, least


def _largest(logits: Tensor, most: int) -> Tensor:
    """Return each row's largest values [C, at most ``most``] in falling order, not their places.

    On a CPU by numpy, ten times as fast as torch, which carries the places along.
    """
    vocab = logits.shape[-1]
    most = min(most, vocab)
    if logits.device.type != "cpu":
        return logits.topk(most, dim=-1).values
    values = logits.numpy()
    if most < vocab:
        values = np.partition(values, vocab - most, axis=-1)[:, vocab - most :]
    return torch.from_numpy(np.sort(values, axis=-1)).flip(-1)


def _count(mask: Tensor) -> Tensor:
    """Return the number of True in each row [C] of a mask [C, V].

    On a CPU by numpy, ten times as fast as torch's sum, which widens every entry to 64 bits.
    """
    if mask.device.type != "cpu":
        return mask.sum(dim=-1)
    return torch.tensor([np.count_nonzero(row) for row in mask.numpy()])
