"""The full KV cache: every column survives, so every number is the base model's.

It is the end point of all cache policies, and proves that the road to a comparison adds nothing.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from umim_core.backbone.backbone import Backbone
from umim_core.baselines.methods import BASELINES, EvictedColumns, HeldColumns
from umim_core.rules.matcher import Matcher


class FullCache:
    """Keep all columns, whatever the budget."""

    reads_attention: ClassVar[bool] = False
    rotation: ClassVar[None] = None

    def survivors(self, held: HeldColumns, budget: int) -> Tensor:
        """Return all columns [H, L]; see ``CachePolicy``."""
        columns = torch.arange(held.keys.shape[1], device=held.keys.device)
        return columns.expand(held.keys.shape[0], -1)


@BASELINES.add("full-cache")
def full_cache(backbone: Backbone, matcher: Matcher) -> EvictedColumns:
    """Keep every column of the KV cache: the base model itself."""
    return EvictedColumns(lambda ids: FullCache())
