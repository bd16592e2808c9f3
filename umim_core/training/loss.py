"""Full-vocabulary distillation loss that never holds more than a chunk of logits.

Shapes: R aligned rows, d hidden size, V vocabulary, C rows per chunk.

    CE   = -(1/R) sum_r sum_v p_T(v) log p_S(v)         soft-target cross-entropy
    KL   = CE - H(p_T)
    grad = (p_S - p_T) W / R                            exact, since the head W is frozen

The gradient is formed in the forward pass, chunk by chunk, and the head takes three matrix products
instead of four. Instead of the 6 R V numbers of a plain step about 4 C V are held on a GPU; on a
CPU 2 C V, the logits of teacher and student, and a few blocks of rows that fit a core's cache.

Source: paper, "Distillation Objective"; log-softmax takes the place of log(p + eps).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from umim_core.backbone.backbone import Backbone
from umim_core.merging.packing import PackedUnits

# Few rows keep logits near the cores of a CPU; a GPU needs many to be busy.
DEFAULT_CHUNK: Final = {"cpu": 256, "gpu": 1024}
# Logits of a block on a CPU: what is read several times stays in a core's cache. 256 rows of 49,152
# took 22 ms instead of 86 on two cores (4 rows a block; 32: 66 ms, 2: 26 ms).
_BLOCK_BYTES: Final = 1 << 20


class AlignedRows(NamedTuple):
    """Indices of aligned predictions [R] (int64), in row-major order.

    The row of the batch, the raw position whose next-token distribution is the target, and the unit
    position whose distribution is trained.
    """

    batch: Tensor
    teacher: Tensor
    student: Tensor


def aligned_rows(
    packed: PackedUnits, states: Sequence[NDArray[np.bool_]] | None = None
) -> AlignedRows:
    """Return the aligned (teacher, student) positions of a batch.

    Left out are a row's units before its first merge, and those whose last token is none of the raw
    positions ``states`` [T_b], if they are given.
    """
    student = packed.attention_mask & (packed.merged.cumsum(dim=1) > 0)
    batch, unit = student.nonzero(as_tuple=True)
    last = packed.ends[batch, unit]
    if states is not None:
        sizes = [0, *map(len, states)]
        counted = torch.from_numpy(np.concatenate(states))
        kept = counted[torch.tensor(sizes).cumsum(0)[batch] + last]
        batch, last, unit = batch[kept], last[kept], unit[kept]
    return AlignedRows(batch, last, unit)


class BatchLoss(NamedTuple):
    """Sums over the weight units (aligned rows, questions) of one batch on one rank.

    ``total`` carries the gradient; of distillation it is the soft-target cross-entropy, and ``kl``
    KL(teacher || student), both in nats. It is a tuple because DeepSpeed looks for the outputs that
    carry a gradient in tuples, lists and mappings only.
    """

    total: Tensor
    kl: Tensor
    weight: float


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, weight: Tensor, bias: Tensor | None, chunk: int
    ) -> tuple[Tensor, Tensor]:
        total = torch.zeros((), dtype=_wide(student), device=student.device)
        divergence = torch.zeros_like(total)
        gradient = torch.empty_like(student) if ctx.needs_input_grad[0] else None
        pages = [_pages(student, weight, chunk) for _ in range(2)]
        terms = blocked_terms if student.device.type == "cpu" else row_terms
        for start in range(0, len(student), chunk):
            rows = slice(start, start + chunk)
            log_likelihood, kl, residual = terms(
                _logits(teacher[rows], weight, bias, pages[0]),
                _logits(student[rows], weight, bias, pages[1]),
            )
            total -= log_likelihood.sum()
            divergence += kl.sum()
            if gradient is not None:
                gradient[rows] = residual.to(weight.dtype) @ weight
            del residual  # before the next chunk's logits are made
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(divergence)
        return total, divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_total.to(gradient.dtype), None, None, None, None


def blocked_terms(teacher: Tensor, student: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return :func:`row_terms`, formed in blocks of rows that fit a core's cache.

    On some processors a single row is summed in another order than rows together, so that the last
    bits differ. The student's logits are overwritten.
    """
    fitting = max(1, _BLOCK_BYTES // (student.shape[1] * student.element_size()))
    block = 1 << (fitting.bit_length() - 1)  # threads share rows out: of five, one would wait
    log_likelihoods, divergences = [], []
    for part_t, part_s in zip(
        torch.split(teacher, block), torch.split(student, block), strict=True
    ):
        log_likelihood, kl, residual = row_terms(part_t, part_s)
        log_likelihoods.append(log_likelihood)
        divergences.append(kl)
        part_s.copy_(residual)
    return torch.cat(log_likelihoods), torch.cat(divergences), student


def row_terms(teacher: Tensor, student: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return sum p_T log p_S [C], KL(teacher || student) [C] and p_S - p_T [C, V] of logits."""
    teacher = teacher.log_softmax(dim=-1)  # the names are reused so that logits are freed at once
    p_t = teacher.exp()
    student = student.log_softmax(dim=-1)
    # A dot product adds up in order, and loses two digits over a vocabulary; a sum does not.
    kl = teacher.sub_(student).mul_(p_t).sum(dim=-1)
    log_likelihood = torch.mul(p_t, student, out=teacher).sum(dim=-1)
    return log_likelihood, kl, student.exp_().sub_(p_t)


def _wide(tensor: Tensor) -> torch.dtype:
    """Return the type that sums are kept in: at least float32."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _pages(states: Tensor, weight: Tensor, chunk: int) -> Tensor | None:
    """Return room for the logits [C, V] of every chunk in turn, None where an allocator keeps it.

    On a CPU 50 MB of logits are mapped anew for each chunk, and every page is cleared: 6 % of a
    step of SmolLM2-135M.
    """
    if states.device.type != "cpu":
        return None
    return states.new_empty(min(chunk, len(states)), len(weight))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, page: Tensor | None) -> Tensor:
    """Return logits [C, V] in at least float32, in ``page`` where there is one."""
    if page is not None:
        out = page[: len(hidden)]
        if bias is None:
            return torch.mm(hidden, weight.T, out=out)
        return torch.addmm(bias, hidden, weight.T, out=out)
    if weight.dtype is _wide(weight):
        return F.linear(hidden, weight, bias)
    logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return logits if bias is None else logits.add_(bias)


def distill_loss(
    student: Tensor, teacher: Tensor, backbone: Backbone, chunk: int | None = None
) -> BatchLoss:
    """Return the loss sums over aligned rows; zero, and without NaN, for R = 0.

    Student and teacher are hidden states at the same rows [R, d]; the first carries the gradient.
    The backbone's head in half precision stays so on a GPU, where products of halves give float32
    logits, and is widened on a CPU. Logits of ``chunk`` rows C are held at once; None chooses by
    the kind of device.
    """
    weight, bias, device = backbone.head_weight, backbone.head_bias, student.device.type
    if device == "cpu":
        weight = weight.to(torch.promote_types(_wide(weight), student.dtype))
        bias = None if bias is None else bias.to(weight.dtype)
    chunk = chunk or DEFAULT_CHUNK["cpu" if device == "cpu" else "gpu"]
    states = student.to(weight.dtype), teacher.to(weight.dtype)
    total, divergence = _SoftCrossEntropy.apply(  # type: ignore[no-untyped-call]  # torch's own
        *states, weight, bias, chunk
    )
    return BatchLoss(total, divergence, len(student))


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, gradients: Sequence[Tensor | None], *sources: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_value: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            None if part is None else part * grad_value.to(part.dtype) for part in ctx.saved_tensors
        ]
        return None, None, *scaled


def with_gradient(
    value: Tensor, sources: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> Tensor:
    """Return a number whose gradients by some tensors were computed before; None for none."""
    out: Tensor = _WithGradient.apply(  # type: ignore[no-untyped-call]  # theirs
        value, tuple(gradients), *sources
    )
    return out


def summed_parts(losses: Iterable[Tensor], sources: Sequence[Tensor]) -> Tensor:
    """Return the sum of losses, with its gradients; only one loss holds activations at a time."""
    values: list[Tensor] = []
    sums: list[Tensor | None] = [None] * len(sources)
    for loss in losses:
        add_gradients(sums, loss, sources)
        values.append(loss.detach())
    return with_gradient(torch.stack(values).sum(), sources, sums)


def add_gradients(sums: list[Tensor | None], loss: Tensor, sources: Sequence[Tensor]) -> None:
    """Add the gradients of a loss by its sources, none of them frozen, to the sums, in place."""
    for place, part in enumerate(torch.autograd.grad(loss, sources, allow_unused=True)):
        before = sums[place]
        if part is not None:
            sums[place] = part if before is None else before + part
