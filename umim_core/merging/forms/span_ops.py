"""Base of the forms of the merge module.

Shapes: M spans, N tokens in the longest span, d embedding size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn


def inside_spans(lengths: Tensor, width: int) -> Tensor:
    """Return which of ``width`` offsets lie in a span of each length: [M, width] (bool)."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def draw_linear(linear: nn.Linear, generator: torch.Generator | None) -> None:
    """Draw a linear layer as PyTorch does by default: weight, then bias, +-1/sqrt(inputs)."""
    bound = 1.0 / math.sqrt(linear.in_features)
    linear.weight.uniform_(-bound, bound, generator=generator)
    linear.bias.uniform_(-bound, bound, generator=generator)


def reset_norm(norm: nn.LayerNorm, gain: float) -> None:
    norm.weight.fill_(gain)
    norm.bias.zero_()


def last_embedding(spans: Tensor, lengths: Tensor) -> Tensor:
    """Take the last embedding of spans [M, N, d] with lengths [M]: [M, d]."""
    return spans[torch.arange(len(spans), device=spans.device), lengths - 1]


def exponential_embedding(spans: Tensor, lengths: Tensor) -> Tensor:
    """Average the embeddings of spans [M, N, d] with lengths [M], weights 1, 2, 4, 8: [M, d]."""
    inside = inside_spans(lengths, spans.shape[1])
    weights = inside * torch.exp2(torch.arange(spans.shape[1], device=spans.device)).to(spans.dtype)
    weights = weights / weights.sum(dim=1, keepdim=True)
    return (weights[..., None] * spans.masked_fill(~inside[..., None], 0.0)).sum(dim=1)


ANCHORS: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "last": last_embedding,
    "exponential": exponential_embedding,
}
