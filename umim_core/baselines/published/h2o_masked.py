"""H2O as its authors' code for lm-eval has it: queries of the prompt see a cut cache, too.

Context and continuation are read in one forward, and a mask stands for the cache that H2O would
hold at every token. ``h2o`` reads the prompt whole instead, as the authors' code for generation
does, and drops columns behind it. With two heavy hitters and two newest ones, query ``e`` of the
tokens a .. e sees::

    newest        c d e       itself and two before it
    hitters       a   e       the column of the most attention so far, and itself
    masked        b           of no later query a hitter again

Heavy hitters are found from the weights that whole attention would have in the layer.

Source: ``h2o_hf/utils_lm_eval/modify_llama.py`` of FMInference/H2O; written anew.

Shapes: A attention heads, H key/value heads, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from umim_core.backbone.attention_masks import attention_switched, check_attention_window
from umim_core.backbone.backbone import Backbone
from umim_core.baselines.h2o import HeavyHitters
from umim_core.baselines.methods import BASELINES, EvictedColumns, Ints
from umim_core.merging.likelihood import TokenScores, target_scores
from umim_core.rules.matcher import Matcher

_NAME: Final = "umim_h2o_masked"
_half: ContextVar[float | None] = ContextVar("_half", default=None)  # share of the hitters


@torch.no_grad()
def score_masked(
    context: Ints, endings: Sequence[Ints], backbone: Backbone, budget: int
) -> list[TokenScores]:
    """Score continuations of one context under masks of heavy hitters and newest columns.

    Args:
        context: Raw ids [T], at least one.
        endings: Raw continuations, at least one token each.
        backbone: The frozen model.
        budget: Columns that may stay of the context. The same share stays of context and
            continuation together, half of it heavy hitters, half newest columns.

    Raises:
        GenerationError: If a text exceeds the window of a sliding-window backbone.
    """
    scores = []
    for ending in endings:
        ids = torch.tensor([[*context.tolist(), *ending.tolist()]], device=backbone.device)
        check_attention_window(backbone.model.config, ids.shape[1])
        with _masked(backbone, budget / len(context) / 2):
            hidden = backbone.hidden(backbone.embed(ids[:, :-1]))[0]
        targets = ids[0, len(context) :]
        scores.append(target_scores(hidden[len(context) - 1 :], targets, backbone))
    return scores


def heavy_hitter_mask(weights: Tensor, heavy: int, newest: int) -> Tensor:
    """Return which columns each query sees [A, T, T] (bool).

    Args:
        weights: Weights of whole causal attention [A, T, T].
        heavy: Heavy hitters, the query's own column among them; 0 for none.
        newest: Columns before a query's own that it sees whatever their score.
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


@contextmanager
def _masked(backbone: Backbone, half: float) -> Iterator[None]:
    with attention_switched(backbone.model, _NAME):
        token = _half.set(half)
        try:
            yield
        finally:
            _half.reset(token)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend under the mask: query [1, A, T, D], key and value [1, H, T, D] -> [1, T, A, D]."""
    half = _half.get()
    if half is None:
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    heads, tokens, width = query.shape[1:]
    keys, values = (part[0].repeat_interleave(heads // part.shape[1], 0) for part in (key, value))
    scaling = options.get("scaling")
    logits = query[0] @ keys.mT * (width**-0.5 if scaling is None else scaling)
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=logits.device).triu(1)
    logits = logits.float().masked_fill(later, -torch.inf)
    share = int(half * tokens)
    seen = heavy_hitter_mask(logits.softmax(dim=-1), share, share)
    weights = logits.masked_fill(~seen, -torch.inf).softmax(dim=-1).to(values.dtype)
    return (weights @ values).transpose(0, 1)[None], None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)


@BASELINES.add("h2o-masked-prompt")
def h2o_masked_prompt(backbone: Backbone, matcher: Matcher) -> EvictedColumns:
    """Drop columns as h2o, in likelihoods while the prompt is read, as its code for lm-eval."""
    return EvictedColumns(lambda ids: HeavyHitters(), score=score_masked)
