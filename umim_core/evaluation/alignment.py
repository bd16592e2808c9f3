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

All metrics are means over rows. Tokens are ranked by logit, ties by id, in teacher and student, so
that top1 = 1 exactly where the reciprocal rank is 1. Ranks are those of the logits as they are;
whatever is added up is float64. On a CPU rows are measured in blocks that stay in a core's cache,
in buffers that are kept for all of them: mapping new ones took 40 % of the time.

Shapes: R rows, C rows of a block, V vocabulary.

Source: paper, "Alignment Metrics"; Top-p divides by the smaller set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umim_core.backbone.backbone import Backbone
from umim_core.errors import EvaluationError, NumericalError, require
from umim_core.evaluation.standard_errors import ratio_error
from umim_core.merging.decode_states import BranchLayout, branch_layout
from umim_core.merging.likelihood import check_ids, state_hidden
from umim_core.merging.merged_model import MergedModel

METRICS = ("top1", "top3", "top10", "topp", "mrr", "kl", "cross_entropy")
TOP_P = 0.9
_LARGEST: Final = 2048  # logits that are sorted for the nucleus; few rows need more
_BLOCK_BYTES: Final = 2 << 20  # one of three float64 buffers of a block on a CPU


def row_metrics(teacher: Tensor, student: Tensor) -> dict[str, Tensor]:
    """Return every metric of each row [R] (float64) of logits [R, V] of teacher and student.

    The teacher's are at least float32: rounded logits tie where the model does not.
    """
    blocks = _blocks(teacher, student)
    parts = [_block_metrics(t, s, _row_sums(t, s, room)) for t, s, room in blocks]
    return {name: torch.cat([part[name] for part in parts]) for name in METRICS}


def row_divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Return KL(teacher || student) of each row [R] of logits [R, V], in nats (float64)."""
    return torch.cat([_row_sums(t, s, room).kl for t, s, room in _blocks(teacher, student)])


def _blocks(teacher: Tensor, student: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield logits of teacher and student [C, V], and room [3, C, V] (float64) for their sums."""
    rows, vocab = teacher.shape
    block = max(1, _BLOCK_BYTES // (8 * vocab) if teacher.device.type == "cpu" else rows)
    room = teacher.new_empty(3, min(block, rows), vocab, dtype=torch.float64)
    for part_t, part_s in zip(
        torch.split(teacher, block), torch.split(student, block), strict=True
    ):
        yield part_t, part_s, room[:, : len(part_t)]


class _RowSums(NamedTuple):
    """Sums over the vocabulary of each row [C]."""

    log_sum_t: Tensor  # log of the sum of exp(logit)
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
        "top3": _top_k_overlap(first_t, first_s, 3),
        "top10": _top_k_overlap(first_t, first_s, 10),
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
        rest, chosen = logits[far], token[far]
        score = rest.gather(1, chosen)
        earlier = torch.arange(rest.shape[-1], device=rest.device) < chosen
        rank[far] = 1 + _count((rest > score) | ((rest == score) & earlier))
    return rank


def _top_k_overlap(first_t: Tensor, first_s: Tensor, k: int) -> Tensor:
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


# Rows whose logits are held at once. Their memory is kept: mapped anew, a CPU clears all of it.
_HEAD_ROWS: Final = {"cpu": 128, "gpu": 512}
_HEAD_IDS: Final = 8192  # vocabulary entries whose weights are widened at once


@dataclass(frozen=True)
class AlignmentResult:
    row_sums: NDArray[np.float64]  # of every metric over the paper's rows of each text row [B, M]
    row_counts: NDArray[np.int64]  # how many of the paper's rows each has [B]
    state_means: dict[str, float]
    state_rows: int
    token_reduction: float
    spans_per_row: float

    @property
    def aligned_rows(self) -> int:
        return int(self.row_counts.sum())

    @property
    def means(self) -> dict[str, float]:
        means = self.row_sums.sum(axis=0) / self.aligned_rows
        return dict(zip(METRICS, means.tolist(), strict=True))

    @property
    def errors(self) -> dict[str, float]:
        """Standard errors of ``means`` over the rows of text; nothing for a single row."""
        sums = zip(METRICS, self.row_sums.T, strict=True)
        errors = {name: ratio_error(of_metric, self.row_counts) for name, of_metric in sums}
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
    rows: Sequence[NDArray[np.integer]], merged_model: MergedModel, batch_size: int = 8
) -> AlignmentResult:
    """Compare next-token distributions on raw and on merged input, rows of raw ids [T_b]."""
    check_ids(rows, merged_model.backbone.vocab_size)
    row_sums = np.zeros((len(rows), len(METRICS)))  # over the paper's rows of each row of text
    row_counts = np.zeros(len(rows), dtype=np.int64)
    state_sums, state_rows = np.zeros(len(METRICS)), 0
    raw = units = spans = 0
    for first in range(0, len(rows), batch_size):
        part = rows[first : first + batch_size]
        packed = merged_model.pack(part)
        raw += int(packed.lengths.sum())
        units += int(packed.unit_counts.sum())
        spans += int(packed.merged.sum())
        layout = branch_layout(packed, merged_model.require_matcher(), merged_model.unit_positions)
        merged = (layout.lengths > 1).cumsum(dim=1) > 0
        chosen = merged & (layout.lengths > 0)  # the states from the first merge on
        if not bool(chosen.any()):
            continue
        unit_end, of_row = layout.trunk[chosen], chosen.nonzero()[:, 0]
        pairs = logit_pairs(part, layout, chosen, merged_model)
        for teacher, student, chunk in pairs:
            values = row_metrics(teacher, student)
            table = torch.stack([values[name] for name in METRICS], dim=1)
            state_sums += table.sum(dim=0).cpu().numpy()
            state_rows += len(table)
            ends, owners = table[unit_end[chunk]], of_row[chunk][unit_end[chunk]]
            sums = table.new_zeros(len(part), len(METRICS)).index_add_(0, owners, ends)
            row_sums[first : first + len(part)] += sums.cpu().numpy()
            row_counts[first : first + len(part)] += (
                owners.bincount(minlength=len(part)).cpu().numpy()
            )
    rule = "some rule must match in the held-out rows"
    remedy = "Use rules of similar text."
    found = f"{len(rows)} rows without a match"
    require(bool(row_counts.any()), EvaluationError, rule, found, remedy)
    state_means = dict(zip(METRICS, (state_sums / state_rows).tolist(), strict=True))
    rule, remedy = "every alignment metric must be finite", "Check the module's weights."
    require(bool(np.isfinite(state_sums).all()), NumericalError, rule, state_means, remedy)
    reduction = (raw - units) / raw
    return AlignmentResult(
        row_sums=row_sums,
        row_counts=row_counts,
        state_means=state_means,
        state_rows=state_rows,
        token_reduction=reduction,
        spans_per_row=spans / len(rows),
    )


def logit_pairs(
    rows: Sequence[NDArray[np.integer]],
    layout: BranchLayout,
    chosen: Tensor,
    merged_model: MergedModel,
) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """Yield logits [C, V] on raw and on merged input, of the same places of a text, in chunks.

    They are at least float32: rounded to bfloat16 they tie. The next chunk overwrites them. The
    third value says which C of the wanted states [B, T] (bool) they are. Rows are raw ids [T_b].
    """
    backbone = merged_model.backbone
    ids = np.zeros(tuple(layout.lengths.shape), dtype=np.int64)
    for b, row in enumerate(rows):
        ids[b, : len(row)] = row
    tokens = torch.from_numpy(ids).to(backbone.device)
    student = state_hidden(tokens, layout, merged_model)[chosen]
    teacher = backbone.hidden(backbone.embed(tokens))[chosen]  # causal: none sees padding
    most = _HEAD_ROWS["cpu" if tokens.device.type == "cpu" else "gpu"]
    wide = torch.promote_types(backbone.head_weight.dtype, torch.float32)
    pages = student.new_empty(2, min(most, len(student)), len(backbone.head_weight), dtype=wide)
    for first in range(0, len(student), most):
        chunk = slice(first, first + most)
        _fill_logits(teacher[chunk], backbone, pages[0])
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
