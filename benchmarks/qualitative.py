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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cosine_similarity

from umim_core.backbone.attention_masks import check_attention_window, eager_attention
from umim_core.backbone.backbone import Backbone
from umim_core.merging.merged_model import MergedModel

Map = NDArray[np.float64]


@torch.no_grad()
def attention_maps(
    ids: Sequence[int] | NDArray[np.integer], merged_model: MergedModel
) -> tuple[Map, Map, list[int]]:
    """Read a text of raw ids [T], at least one, and return where the last layer looks.

    The backbone's attention is eager meanwhile: not for use during a generation.

    Returns:
        Mean attention over heads [S, S] (query, key): raw, the tokens of a unit added up, and
        merged; the raw tokens of each unit [S].
    """
    backbone, row = merged_model.backbone, np.asarray(ids, dtype=np.int64)
    check_attention_window(backbone.model.config, len(row))
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
    before_mean, after_mean = (weights.mean(dim=0).cpu().numpy() for weights in (summed, after))
    return before_mean, after_mean, lengths.tolist()


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


@torch.no_grad()
def surrogate_similarity(
    spans: Sequence[Sequence[int]], merged_model: MergedModel
) -> list[dict[str, Any]]:
    """Compare z(span) with the static embeddings of its tokens, by order, shortest first.

    Mean cosines of the ``spans`` of an ``order`` of n tokens are ``by_offset`` [n], with the token
    at each offset, ``mean``, with the mean of the span's embeddings, and ``random``, with that of a
    random token.
    """
    backbone, generator = merged_model.backbone, np.random.default_rng(0)
    similarities = []
    for order in sorted({len(span) for span in spans}):
        chosen = np.array([span for span in spans if len(span) == order], dtype=np.int64)
        ids = torch.from_numpy(chosen).to(backbone.device)
        merged = merged_model.surrogates(ids, torch.full((len(chosen),), order).to(ids))
        tokens = backbone.embed(ids)
        drawn = generator.integers(0, backbone.vocab_size, len(chosen))
        alone = backbone.embed(torch.from_numpy(drawn).to(ids))
        row = {
            "order": order,
            "spans": len(chosen),
            "by_offset": [_cosine(merged, tokens[:, offset]) for offset in range(order)],
            "mean": _cosine(merged, tokens.mean(dim=1)),
            "random": _cosine(merged, alone),
        }
        similarities.append(row)
    return similarities


def _cosine(left: Tensor, right: Tensor) -> float:
    """Return the mean cosine of paired rows [M, d]."""
    return float(cosine_similarity(left.cpu().double(), right.cpu().double(), dim=-1).mean())
