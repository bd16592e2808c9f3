"""StreamingLLM: the first four columns of the KV cache stay, as attention sinks, and the newest.

With a budget of 7 columns after the tokens a .. j::

    columns     a b c d  h i j        the sinks and the 3 newest
    positions   0 1 2 3  4 5 6        those in the cache: the keys of h i j are turned back by 3
    next token  7

``streaming-llm`` is the original. ``streaming-llm-kept-positions`` leaves what stays at the
positions 0 1 2 3 7 8 9 and puts the next token at 10: the only form for backbones whose positions
are not a rotation of the keys.

Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks (2024).

Shapes: H key/value heads, L columns, K columns kept.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from umim_core.backbone.backbone import Backbone
from umim_core.backbone.key_rotation import KeyRotation, key_rotation
from umim_core.baselines.methods import CachePolicy, EvictedColumns, HeldColumns
from umim_core.rules.matcher import Matcher

SINKS: Final = 4


class SinksAndNewest(CachePolicy):
    """Keep the first columns and the newest ones, turned to positions in the cache or not."""

    def __init__(self, rotation: KeyRotation | None) -> None:
        self.rotation = rotation

    def survivors(self, held: HeldColumns, budget: int) -> Tensor:
        """Return the columns that stay [H, K]; see ``CachePolicy``.

        The newest column always stays, so a budget of four or less has fewer sinks.
        """
        heads, columns = held.keys.shape[:2]
        budget = min(budget, columns)
        sinks = min(SINKS, budget - 1)
        places = torch.arange(budget, device=held.keys.device)
        places[sinks:] += columns - budget
        return places.expand(heads, -1)


def streaming_llm(backbone: Backbone, matcher: Matcher, *, restart: bool) -> EvictedColumns:
    """Return the method; positions restart inside the cache, or stay those of the tokens."""
    rotation = key_rotation(backbone) if restart else None
    return EvictedColumns(lambda ids: SinksAndNewest(rotation))
