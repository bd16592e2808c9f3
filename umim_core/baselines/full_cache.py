"""The full KV cache: every column survives, so every number is the base model's.

It is the end point of all cache policies, and proves that the road to a comparison adds nothing.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from umim_core.baselines.methods import HeldColumns


class FullCache:
    """Keep all columns, whatever the budget."""

    reads_attention: ClassVar[bool] = False
    rotation: ClassVar[None] = None

    def survivors(self, held: HeldColumns, budget: int) -> Tensor:
        columns = torch.arange(held.keys.shape[1], device=held.keys.device)
        return columns.expand(held.keys.shape[0], -1)
