"""Anchors: fixed combinations of a span's embeddings, without parameters, that a module adds to.

Shapes: M spans, N tokens in the longest span, d embedding size. With e1 e2 e3 in a span::

    last         e3
    exponential  (e1 + 2 e2 + 4 e3) / 7       each token twice the weight of the one before it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from umim_core.merging.forms.merge_form import inside_spans


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
