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

``h2o`` reads the prompt whole and drops columns behind it, as the authors' code for generation
does. ``h2o-masked-prompt`` scores likelihoods as their code for lm-eval: context and continuation
are read in one forward, and a mask stands for the cache that H2O would hold at every token, by the
weights that whole attention would have in the layer. With two heavy hitters and two newest ones,
query ``e`` of the tokens a .. e sees::

    newest        c d e       itself and two before it
    hitters       a   e       the column of the most attention so far, and itself
    masked        b           of no later query a hitter again

Source: Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
Models (2023), algorithm 1; ``h2o_hf/utils_lm_eval/modify_llama.py`` of FMInference/H2O, written
anew.

Shapes: H key/value heads, A attention heads, T tokens, L columns, W columns of a forward, K columns
kept, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from umim_core.backbone.attention_masks import OwnAttention
from umim_core.backbone.backbone import Backbone
from umim_core.baselines.methods import CachePolicy, HeldColumns
from umim_core.merging.likelihood import TokenScores, target_scores
from umim_core.text.token_ids import Ints


class HeavyHitters(CachePolicy):
    """Keep the columns of the highest accumulated attention and the newest ones, half of each."""

    reads_attention = True

    def __init__(self) -> None:
        self._scores: dict[int, Tensor] = {}  # of the columns that stayed [H, L], layer by layer

    def survivors(self, held: HeldColumns, budget: int) -> Tensor:
        """Return the columns that stay [H, K]; see ``CachePolicy``.

        The heads of queries that share a key/value head count together. Of an odd budget the newest
        columns have the larger half. Of equal scores the first columns stay.
        """
        assert held.attention is not None  # noqa: S101  it reads them
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


@torch.no_grad()
def score_masked(
    context: Ints, endings: Sequence[Ints], backbone: Backbone, budget: int
) -> list[TokenScores]:
    """Score continuations of one context [T] under masks of heavy hitters and newest columns.

    ``budget`` columns may stay of the context. The same share stays of context and continuation
    together, half of it heavy hitters, half newest columns.
    """
    scores = []
    for ending in endings:
        ids = torch.tensor([[*context.tolist(), *ending.tolist()]], device=backbone.device)
        backbone.check_window(ids.shape[1])
        half = budget / len(context) / 2
        with _MASKED.given(backbone.model, half):
            hidden = backbone.hidden(backbone.embed(ids[:, :-1]))[0]
        targets = ids[0, len(context) :]
        scores.append(target_scores(hidden[len(context) - 1 :], targets, backbone))
    return scores


def heavy_hitter_mask(weights: Tensor, heavy: int, newest: int) -> Tensor:
    """Return which columns each query sees [A, T, T] (bool), by whole causal attention [A, T, T].

    It sees ``heavy`` hitters, its own column among them, 0 for none, and ``newest`` columns before
    its own whatever their score.
    """
    tokens = weights.shape[-1]
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=weights.device)
    mask = (seen.tril() & seen.triu(-newest)).expand_as(weights).clone()
    if not heavy:
        return mask
    score = weights[:, :heavy].sum(dim=1)
    mask[:, :heavy, :heavy] |= seen[:heavy, :heavy].tril()
    for query in range(heavy, tokens):
        hitters = torch.zeros_like(score, dtype=torch.bool)
        hitters.scatter_(1, score.topk(heavy - 1, dim=1).indices, True)
        hitters[:, query] = True
        mask[:, query] |= hitters
        score = (score + weights[:, query]) * hitters
    return mask


def _attend(
    half: float, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Tensor:
    """Attend under the mask: query [1, A, T, D], key and value [1, H, T, D] -> [1, T, A, D]."""
    heads, tokens, width = query.shape[1:]
    keys, values = (part[0].repeat_interleave(heads // part.shape[1], 0) for part in (key, value))
    scaling = options.get("scaling")
    logits = query[0] @ keys.mT * (width**-0.5 if scaling is None else scaling)
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=logits.device).triu(1)
    logits = logits.float().masked_fill(later, -torch.inf)
    share = int(half * tokens)
    seen = heavy_hitter_mask(logits.softmax(dim=-1), share, share)
    weights = logits.masked_fill(~seen, -torch.inf).softmax(dim=-1).to(values.dtype)
    attended: Tensor = weights @ values
    return attended.transpose(0, 1)[None]


_MASKED: Final = OwnAttention[float]("umim_h2o_masked", _attend)  # of the share of the hitters
