"""Hidden states of a backbone's trunk: after its final norm, or after every block.

Shapes: B batch, S units, d embedding size, L blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def last_states(
    trunk: nn.Module,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Tensor:
    """Return the hidden states after the final norm [B, S, d].

    Args:
        trunk: The blocks of a causal language model of transformers, with the final norm.
        inputs_embeds: [B, S, d].
        attention_mask: [B, S] (1 = real unit), or an additive float mask [B, 1, S, S], or None.
        position_ids: [B, S] or None for 0 .. S-1. They may jump.
    """
    out: Tensor = trunk(**_inputs(inputs_embeds, attention_mask, position_ids)).last_hidden_state
    return out


def layer_states(
    trunk: nn.Module,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return what every block gives, L times [B, S, d]; the last one's after the final norm.

    All of them are held at once: 30 blocks over 2,048 units of 576 float32 numbers, 142 MB.
    Arguments are those of :func:`last_states`.
    """
    inputs = _inputs(inputs_embeds, attention_mask, position_ids)
    out = trunk(**inputs, output_hidden_states=True)
    return (*out.hidden_states[1:-1], out.last_hidden_state)  # the first are the embeddings


def _inputs(
    inputs_embeds: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
) -> dict[str, Any]:
    if attention_mask is None and position_ids is not None:
        # transformers would take a row whose positions jump for several sequences
        attention_mask = inputs_embeds.new_ones(inputs_embeds.shape[:2], dtype=torch.int64)
    return {
        "inputs_embeds": inputs_embeds,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "use_cache": False,
    }
