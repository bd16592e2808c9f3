"""Qualitative figures: attention before and after merging, and surrogates against their tokens.

Attention of the last layer is put on the same units: attention to the tokens of a span adds up, and
the query of a span is its last token, where both paths predict the same next token. Every row still
sums to 1. A cosine of surrogates with their tokens' embeddings near zero means that the module
learned something other than a copy or a mean of them; the same surrogates against tokens drawn at
random give zero a scale.

Source: paper, figure "attention distributions before and after merging" and "Qualitative Analysis"
(near-zero cosine similarity with the constituent tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cosine_similarity

from umim_core.backbone.attention_masks import check_attention_window, eager_attention
from umim_core.backbone.backbone import Backbone
from umim_core.errors import EvaluationError, require
from umim_core.merging.merged_model import MergedModel


@dataclass(frozen=True)
class AttentionMaps:
    """Mean attention over heads, before and after merging, on the units of one text.

    Attributes:
        before: Over raw tokens, those of a unit added up [S, S] (query, key).
        after: Over units [S, S].
        lengths: Raw tokens of each unit [S]; ``starts`` are the first of them.
    """

    before: NDArray[np.float64]
    after: NDArray[np.float64]
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    layer: int


@torch.no_grad()
def attention_maps(
    ids: Sequence[int] | NDArray[np.integer], merged_model: MergedModel
) -> AttentionMaps:
    """Read a text of raw ids [T] raw and merged and return where the last layer looks.

    The backbone's attention is eager meanwhile: not for use during a generation.
    """
    backbone, config = merged_model.backbone, merged_model.backbone.model.config
    require(len(ids) > 0, EvaluationError, "an attention map needs a token", "none", "Pass text.")
    most = backbone.max_positions
    require(
        most is None or len(ids) <= most,
        EvaluationError,
        f"a text must fit the backbone's {most} positions unmerged",
        f"{len(ids)} tokens",
        "Pass a shorter one.",
    )
    check_attention_window(config, len(ids))
    row = np.asarray(ids, dtype=np.int64)
    packed = merged_model.pack([row])
    lengths, starts = packed.lengths[0], packed.starts[0]
    units = torch.arange(len(starts), device=backbone.device)
    positions = packed.position_ids(merged_model.unit_positions)[0]
    raw = backbone.embed(torch.from_numpy(row)[None].to(backbone.device))
    with eager_attention(backbone.model):
        after = _attention(backbone, merged_model.embed(packed), positions)
        before = _attention(backbone, raw, torch.arange(len(row)).to(positions))
    before = before[:, starts + lengths - 1]  # the last token of each unit asks
    member = torch.repeat_interleave(units, lengths)
    summed = before.new_zeros(len(before), len(starts), len(starts)).index_add(2, member, before)
    return AttentionMaps(
        before=summed.mean(dim=0).cpu().numpy(),
        after=after.mean(dim=0).cpu().numpy(),
        lengths=tuple(lengths.tolist()),
        starts=tuple(starts.tolist()),
        layer=int(config.num_hidden_layers) - 1,
    )


def _attention(backbone: Backbone, embeddings: Tensor, positions: Tensor) -> Tensor:
    """Return the weights [H, L, L] of the last layer for embeddings [1, L, d]."""
    out = backbone.model.base_model(
        inputs_embeds=embeddings,
        # without a mask, transformers would take a row whose positions jump for several sequences
        attention_mask=embeddings.new_ones(embeddings.shape[:2], dtype=torch.int64),
        position_ids=positions[None],
        use_cache=False,
        output_attentions=True,
    )
    weights: Tensor = out.attentions[-1][0]
    return weights.double()


@dataclass(frozen=True)
class OrderSimilarity:
    """Mean cosine similarities of the surrogates of spans of ``order`` tokens n.

    ``by_offset`` [n] is with the token at each offset, ``mean`` with the mean of the span's
    embeddings, ``random`` with one random token's embedding.
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
    """Compare z(span) with the static embeddings of its tokens, by order, shortest first."""
    orders = sorted({len(span) for span in spans})
    require(
        bool(orders) and orders[0] >= 2,
        EvaluationError,
        "similarity needs spans of at least two tokens",
        orders,
        "Pass the ids of merged spans.",
    )
    backbone, generator = merged_model.backbone, np.random.default_rng(0)
    similarities = []
    for order in orders:
        chosen = np.array([span for span in spans if len(span) == order], dtype=np.int64)
        ids = torch.from_numpy(chosen).to(backbone.device)
        merged = merged_model.surrogates(ids, torch.full((len(chosen),), order).to(ids))
        tokens = backbone.embed(ids)
        drawn = generator.integers(0, backbone.vocab_size, len(chosen))
        by_offset = tuple(_cosine(merged, tokens[:, offset]) for offset in range(order))
        alone = backbone.embed(torch.from_numpy(drawn).to(ids))
        means = _cosine(merged, tokens.mean(dim=1)), _cosine(merged, alone)
        similarities.append(OrderSimilarity(order, len(chosen), by_offset, *means))
    return similarities


def _cosine(left: Tensor, right: Tensor) -> float:
    """Return the mean cosine of paired rows [M, d]."""
    return float(cosine_similarity(left.cpu().double(), right.cpu().double(), dim=-1).mean())
