"""Losses in parts: each part leaves its gradient and gives its activations back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _GivenGradient(torch.autograd.Function):
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


def given_gradient(
    value: Tensor, sources: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> Tensor:
    """Return a number whose gradients by some tensors were computed before.

    Args:
        value: The number.
        sources: What it depends on, of any shapes.
        gradients: Its gradient by each of them, of that shape; None for none.
    """
    out: Tensor = _GivenGradient.apply(  # type: ignore[no-untyped-call]  # theirs
        value, tuple(gradients), *sources
    )
    return out


def summed_parts(losses: Iterable[Tensor], sources: Sequence[Tensor]) -> Tensor:
    """Return the sum of losses, with its gradients; only one loss holds activations at a time."""
    values: list[Tensor] = []
    sums: list[Tensor | None] = [None] * len(sources)
    for loss in losses:
        for slot, part in enumerate(torch.autograd.grad(loss, sources, allow_unused=True)):
            before = sums[slot]
            if part is not None:
                sums[slot] = part if before is None else before + part
        values.append(loss.detach())
    return given_gradient(torch.stack(values).sum(), sources, sums)
