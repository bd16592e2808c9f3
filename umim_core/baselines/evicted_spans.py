"""Policies that ignore the budget: the full KV cache, and span eviction by age.

With the full cache every number is the base model's. It is the end point of all cache policies, and
proves that the road to a comparison adds nothing.

Raw columns of span eviction stay until their span is old, then its last one alone. The rules decide
which columns go and when; after a context whose spans are all old enough as many columns stay as
merging would have left units. It is the eviction of generated rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from umim_core.backbone.backbone import Backbone
from umim_core.baselines.methods import CachePolicy, EvictedColumns, HeldColumns
from umim_core.inference.row_eviction import RowEviction
from umim_core.rules.matcher import Matcher
from umim_core.text.token_ids import Ints


class FullCache(CachePolicy):
    def survivors(self, held: HeldColumns, budget: int) -> Tensor:
        columns = torch.arange(held.keys.shape[1], device=held.keys.device)
        return columns.expand(held.keys.shape[0], -1)


class OldSpansGone(CachePolicy):
    """Keep columns [K], rising: all but those that old spans give up, whatever the budget."""

    def __init__(self, kept: Ints) -> None:
        self._kept_columns = torch.from_numpy(kept)

    def survivors(self, held: HeldColumns, budget: int) -> Tensor:
        return self._kept_columns.to(held.keys.device).expand(len(held.keys), -1)


def evicted_spans(backbone: Backbone, matcher: Matcher, *, age: int) -> EvictedColumns:
    def policy(ids: Ints) -> OldSpansGone:
        old = RowEviction(matcher, age, ids.tolist()).take_old()
        return OldSpansGone(np.delete(np.arange(len(ids)), old))

    return EvictedColumns(policy, age)
