"""H2O: columns that queries attended to the most, and the newest ones, stay in the KV cache.

A column's score is the attention weight that it got of all queries since it was written. Half of
the budget are the newest columns, the others those of the highest scores, head by head. A column
that is dropped takes its score along, and queries that come later cannot attend to it.

Weights of one head over the tokens a b c d, and a budget of 3 columns::

    query a   1
    query b   .6  .4
    query c   .1  .5  .4
    query d   .1  .2  .3  .4
    score     1.8 1.1 .7  .4       c and d are the 2 newest; of a and b, a is the heavy hitter

Source: Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
Models (2023), algorithm 1.

Shapes: H key/value heads, A attention heads, L columns, W columns of a forward, K columns kept.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from umim_core.backbone.backbone import Backbone
from umim_core.baselines.methods import BASELINES, EvictedColumns, HeldColumns
from umim_core.errors import EvaluationError
from umim_core.rules.matcher import Matcher


class HeavyHitters:
    """Keep the columns of the highest accumulated attention and the newest ones, half of each."""

    reads_attention: ClassVar[bool] = True
    rotation: ClassVar[None] = None

    def __init__(self) -> None:
        self._scores: dict[int, Tensor] = {}  # of the columns that stayed [H, L], layer by layer

    def survivors(self, held: HeldColumns, budget: int) -> Tensor:
        """Return the columns that stay [H, K]; see ``CachePolicy``.

        The heads of queries that share a key/value head count together. Of an odd budget the newest
        columns have the larger half. Of equal scores the first columns stay.

        Raises:
            EvaluationError: If the forward gave no attention weights.
        """
        if held.attention is None:
            raise EvaluationError(
                "h2o needs the attention weights of every forward",
                f"none of layer {held.layer}",
                "Use a backbone with eager attention.",
            )
        heads, columns = held.keys.shape[:2]
        weights = held.attention.sum(dim=1, dtype=torch.promote_types(held.keys.dtype, torch.float))
        scores = weights.view(heads, -1, columns).sum(dim=1)
        if held.layer in self._scores:
            before = self._scores[held.layer]
            scores[:, : before.shape[1]] += before
        columns_kept = _heaviest_and_newest(scores, min(budget, columns))
        self._scores[held.layer] = scores.gather(1, columns_kept)
        return columns_kept


def _heaviest_and_newest(scores: Tensor, budget: int) -> Tensor:
    """Return columns [H, K], rising, of scores [H, L]; the budget is L at most."""
    heads, columns = scores.shape
    heavy = budget // 2
    older = scores[:, : columns - (budget - heavy)]
    heaviest = older.sort(dim=1, descending=True, stable=True).indices[:, :heavy]
    newest = torch.arange(older.shape[1], columns, device=scores.device).expand(heads, -1)
    return torch.cat([heaviest.sort(dim=1).values, newest], dim=1)


@BASELINES.add("h2o")
def h2o(backbone: Backbone, matcher: Matcher) -> EvictedColumns:
    """Drop the columns that queries attended to the least, but for the newest ones."""
    return EvictedColumns(lambda ids: HeavyHitters())
