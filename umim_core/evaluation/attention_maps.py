"""Attention of one layer over the raw tokens and over the units of a text.

Both maps are put on the same units: attention to the tokens of a span adds up, and the query of a
span is its last token, where both paths predict the same next token. Every row still sums to 1.

Source: paper, figure "attention distributions before and after merging".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umim_core.backbone.attention_masks import check_attention_window, eager_attention
from umim_core.backbone.backbone import Backbone
from umim_core.errors import EvaluationError
from umim_core.merging.merged_model import MergedModel


@dataclass(frozen=True)
class AttentionMaps:
    """Mean attention over heads, before and after merging, on the units of one text.

    Attributes:
        before: Over raw tokens, those of a unit added up [S, S] (query, key).
        after: Over units [S, S].
        lengths: Raw tokens of each unit [S].
        starts: First raw token of each unit [S].
        layer: Which layer.
    """

    before: NDArray[np.float64]
    after: NDArray[np.float64]
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    layer: int


@torch.no_grad()
def attention_maps(
    ids: Sequence[int] | NDArray[np.integer],
    merged_model: MergedModel,
    *,
    layer: int = -1,
    head: int | None = None,
) -> AttentionMaps:
    """Read a text raw and merged and return where one layer looks.

    The backbone's attention is eager meanwhile: not for use during a generation.

    Args:
        ids: Raw ids [T] of a short text, at least one; they must fit the backbone unmerged.
        merged_model: The model; its attention is computed eagerly for the two forwards.
        layer: Index of the layer; negative ones count from the last.
        head: One head; the mean over heads if None.

    Raises:
        EvaluationError: If there is no token, or no such layer or head, or if the text exceeds the
            backbone's positions.
        GenerationError: If it exceeds the window of a sliding-window backbone.
    """
    backbone, config = merged_model.backbone, merged_model.backbone.model.config
    layers, heads = int(config.num_hidden_layers), int(config.num_attention_heads)
    if len(ids) == 0 or not -layers <= layer < layers or not (head is None or 0 <= head < heads):
        raise EvaluationError(
            f"an attention map needs a token, one of {layers} layers and one of {heads} heads",
            f"{len(ids)} tokens, layer {layer}, head {head}",
            "Choose among them.",
        )
    most = backbone.max_positions
    if most is not None and len(ids) > most:
        raise EvaluationError(
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
        after = _attention(backbone, merged_model.embed(packed), positions, layer)
        before = _attention(backbone, raw, torch.arange(len(row)).to(positions), layer)
    before = before[:, starts + lengths - 1]  # the last token of each unit asks
    member = torch.repeat_interleave(units, lengths)
    summed = before.new_zeros(len(before), len(starts), len(starts)).index_add(2, member, before)
    return AttentionMaps(
        before=_chosen(summed, head),
        after=_chosen(after, head),
        lengths=tuple(lengths.tolist()),
        starts=tuple(starts.tolist()),
        layer=layer % layers,
    )


def _attention(backbone: Backbone, embeddings: Tensor, positions: Tensor, layer: int) -> Tensor:
    """Return the weights [H, L, L] of one layer for embeddings [1, L, d]."""
    out = backbone.model.base_model(
        inputs_embeds=embeddings,
        # without a mask, transformers would take a row whose positions jump for several sequences
        attention_mask=embeddings.new_ones(embeddings.shape[:2], dtype=torch.int64),
        position_ids=positions[None],
        use_cache=False,
        output_attentions=True,
    )
    weights: Tensor = out.attentions[layer][0]
    return weights.double()


def _chosen(weights: Tensor, head: int | None) -> NDArray[np.float64]:
    chosen = weights.mean(dim=0) if head is None else weights[head]
    array: NDArray[np.float64] = chosen.cpu().numpy()
    return array
