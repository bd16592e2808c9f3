"""Cosine similarity of surrogates with the embeddings of their tokens.

Near zero means that the module learned something other than a copy or a mean of its tokens. A
baseline gives zero a scale: the same surrogates against tokens drawn at random.

Source: paper, "Qualitative Analysis" (near-zero cosine similarity with the constituent tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from umim_core.errors import EvaluationError
from umim_core.merging.merged_model import MergedModel


@dataclass(frozen=True)
class OrderSimilarity:
    """Mean cosine similarities of the surrogates of one order.

    Attributes:
        order: Tokens n of a span.
        spans: Number of spans.
        by_offset: With the token at each offset [n].
        mean: With the mean of the span's embeddings.
        random: With one random token's embedding.
    """

    order: int
    spans: int
    by_offset: tuple[float, ...]
    mean: float
    random: float


@torch.no_grad()
def surrogate_similarity(
    spans: Sequence[Sequence[int]], merged_model: MergedModel
) -> list[OrderSimilarity]:
    """Compare z(span) with the static embeddings of its tokens.

    Returns:
        One entry per order that occurs, shortest first.

    Raises:
        EvaluationError: If there is no span or one has fewer than two tokens.
    """
    if not spans or min(map(len, spans)) < 2:
        raise EvaluationError(
            "similarity needs spans of at least two tokens",
            sorted({len(span) for span in spans}),
            "Pass the ids of merged spans.",
        )
    backbone, generator = merged_model.backbone, np.random.default_rng(0)
    similarities = []
    for order in sorted({len(span) for span in spans}):
        own = np.array([span for span in spans if len(span) == order], dtype=np.int64)
        ids = torch.from_numpy(own).to(backbone.device)
        merged = merged_model.surrogates(ids, torch.full((len(own),), order).to(ids))
        tokens = backbone.embed(ids)
        drawn = torch.from_numpy(generator.integers(0, backbone.vocab_size, len(own))).to(ids)
        by_offset = [_cosine(merged, tokens[:, offset]) for offset in range(order)]
        similarities.append(
            OrderSimilarity(
                order=order,
                spans=len(own),
                by_offset=tuple(by_offset),
                mean=_cosine(merged, tokens.mean(dim=1)),
                random=_cosine(merged, backbone.embed(drawn)),
            )
        )
    return similarities


def _cosine(left: Tensor, right: Tensor) -> float:
    """Return the mean cosine of paired rows [M, d]."""
    return float(cosine_similarity(left.cpu().double(), right.cpu().double(), dim=-1).mean())
