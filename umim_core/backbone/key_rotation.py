"""Rotary keys turned to other positions: a KV cache after columns in front of them went.

A rotary model turns the pairs of a key's dimensions by angles that are proportional to its
position. A key that was written at position p is that of position q once it is turned by q - p::

    columns      a b c d e        written at 0 1 2 3 4
    c is gone    a b d e          turned by  0 0 -1 -1: the keys of positions 0 1 2 3

Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding (2021).

Shapes: H key/value heads, L columns, D head size, R dimensions that are turned (R <= D).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from umim_core.backbone.backbone import Backbone
from umim_core.backbone.trials import state_difference, state_tolerance
from umim_core.errors import BackboneError

_STEP: Final = 3  # positions that the trial turns keys by
_CHANGING: Final = ("dynamic", "longrope")  # frequencies that depend on the longest position


@dataclass(frozen=True)
class KeyRotation:
    """The rotation of a backbone's keys by positions.

    ``frequencies`` [R / 2] are the angles per position of pairs of dimensions, R / 2 apart.
    """

    frequencies: Tensor

    def turn(self, keys: Tensor, steps: Tensor) -> Tensor:
        """Turn keys [H, L, D] by the positions that each is moved by [H, L] (int64).

        They are negative to the front; keys that are moved by 0 are the same bits.
        """
        wide = torch.promote_types(keys.dtype, torch.float)
        angles = steps[..., None] * self.frequencies.to(wide)
        cos, sin = angles.cos().to(keys.dtype), angles.sin().to(keys.dtype)
        half = len(self.frequencies)
        first, second, rest = keys.tensor_split((half, 2 * half), dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


@torch.no_grad()
def key_rotation(backbone: Backbone) -> KeyRotation:
    """Return the rotation of a backbone's keys, once it was tried on every layer.

    One token alone attends to itself, so in every layer its keys at two positions differ by the
    rotation and by nothing else.
    """
    settings = backbone.model.config.to_dict().get("rope_parameters") or {}
    kind = settings.get("rope_type")
    if kind is None:
        _refuse(backbone, "its configuration has no rotation of all layers")
    if kind in _CHANGING:
        _refuse(backbone, f"its frequencies change with the length ({kind})")
    try:
        frequencies = backbone.trunk.get_submodule("rotary_emb").get_buffer("inv_freq")
    except AttributeError:
        _refuse(backbone, "its trunk has no rotary embedding of its own")
    rotation = KeyRotation(frequencies)
    ids = torch.zeros(2, 1, dtype=torch.int64, device=backbone.device)
    cache = DynamicCache()
    backbone.trunk(
        inputs_embeds=backbone.embed(ids),
        attention_mask=torch.ones_like(ids),
        position_ids=torch.tensor([[0], [_STEP]], device=backbone.device),
        past_key_values=cache,
        use_cache=True,
    )
    for number, layer in enumerate(cache.layers):
        if not isinstance(layer, DynamicLayer) or layer.keys is None:
            _refuse(backbone, f"layer {number} has no keys of its own")
        first, later = layer.keys
        steps = torch.full(first.shape[:2], _STEP, device=first.device)
        if 2 * len(frequencies) > first.shape[-1]:
            _refuse(backbone, f"keys of layer {number} have fewer dimensions than are turned")
        if state_difference(rotation.turn(first, steps), later) > state_tolerance(backbone):
            _refuse(backbone, f"keys of layer {number} are turned in another way")
    return rotation


def _refuse(backbone: Backbone, reason: str) -> NoReturn:
    rule = "keys can be moved only where all layers turn them by their positions"
    remedy = "Use a rotary backbone, or a cache policy that leaves columns at their positions."
    raise BackboneError(rule, f"{type(backbone.model).__name__}: {reason}", remedy)
