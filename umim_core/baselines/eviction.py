"""Continuations scored on a KV cache that a policy has cut down after the prefill.

With a context a b c d, a policy that keeps the columns of a and d, and the continuation y z::

    prefill     a b c d      predicts y         the whole context is read, and is paid for
    cache       a     d      positions 0 3
    forward     y            predicts z         at position 4: it sees a d and itself

Shapes: T context tokens, H key/value heads, L columns, W columns of a forward, d embedding size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from umim_core.backbone.attention_masks import check_attention_window, eager_attention
from umim_core.backbone.backbone import Backbone
from umim_core.baselines.methods import CachePolicy, HeldColumns, Ints
from umim_core.errors import EvaluationError
from umim_core.merging.likelihood import TokenScores, target_scores


@torch.no_grad()
def score_evicted(
    context: Ints,
    endings: Sequence[Ints],
    backbone: Backbone,
    new_policy: Callable[[Ints], CachePolicy],
    budget: int,
) -> tuple[list[TokenScores], int]:
    """Score continuations of one context on the columns that a policy keeps of it.

    The first token of a continuation is predicted by the prefill, before anything is dropped.

    Args:
        context: Raw ids [T], at least one.
        endings: Raw continuations, at least one token each.
        backbone: The frozen model.
        new_policy: Makes the policy of a text, given its raw ids.
        budget: Columns that may stay of the context, at least 1.

    Returns:
        One score per continuation, in order, and the columns that stayed.

    Raises:
        EvaluationError: If context and continuation exceed the backbone's positions, or the policy
            breaks its protocol.
        GenerationError: If they exceed the window of a sliding-window backbone.
    """
    limit, longest = backbone.max_positions, len(context) + max(map(len, endings)) - 1
    if limit is not None and longest > limit:
        raise EvaluationError(
            f"a context and one continuation must fit the backbone's {limit} positions",
            f"{longest} positions",
            "Cut the context on the left.",
        )
    check_attention_window(backbone.model.config, longest)

    def tensor(ids: Ints) -> Tensor:
        return torch.from_numpy(ids).to(backbone.device)

    cache, policy = DynamicCache(), new_policy(context)
    if policy.reads_attention:
        with eager_attention(backbone.model):
            hidden, attention = _forward(tensor(context), 0, cache, backbone, attention=True)
    else:
        hidden, attention = _forward(tensor(context), 0, cache, backbone)
    _evict(cache, policy, budget, attention)
    columns, scores = cache.get_seq_length(), []
    for ending in endings:
        targets = tensor(ending)
        parts = [target_scores(hidden[-1:], targets[:1], backbone)]
        if len(ending) > 1:
            states, _ = _forward(targets[:-1], len(context), cache, backbone)
            parts.append(target_scores(states, targets[1:], backbone))
            cache.crop(1 - len(ending))  # the next continuation begins where this one did
        scores.append(
            TokenScores(
                torch.cat([part.log_probs for part in parts]),
                torch.cat([part.greedy for part in parts]),
            )
        )
    return scores, columns


def _forward(
    ids: Tensor, first: int, cache: DynamicCache, backbone: Backbone, *, attention: bool = False
) -> tuple[Tensor, Sequence[Tensor] | None]:
    """Read ids [W] at positions from ``first`` on: hidden states [W, d], weights per layer."""
    positions = torch.arange(first, first + len(ids), device=ids.device)[None]
    seen = positions.new_ones(1, cache.get_seq_length() + len(ids))  # all of it is one text
    out = backbone.trunk(
        inputs_embeds=backbone.embed(ids[None]),
        attention_mask=seen,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        output_attentions=attention,
    )
    return out.last_hidden_state[0], out.attentions if attention else None


def _evict(
    cache: DynamicCache, policy: CachePolicy, budget: int, attention: Sequence[Tensor] | None
) -> None:
    """Keep the columns of every layer that the policy chooses after the first forward."""
    for number, layer in enumerate(cache.layers):
        if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
            raise EvaluationError(
                "every layer must keep keys and values of its own",
                f"layer {number} has none",
                "Use a backbone without shared or recurrent layers.",
            )
        keys, values = layer.keys[0], layer.values[0]
        positions = torch.arange(keys.shape[1], device=keys.device).expand(len(keys), -1)
        weights = None if attention is None else attention[number][0]
        held = HeldColumns(number, keys, values, positions, weights)
        kept = _checked(policy.survivors(held, budget), held)
        layer.keys, layer.values = (
            states.gather(1, kept[..., None].expand(-1, -1, states.shape[-1]))[None]
            for states in (keys, values)
        )


def _checked(kept: Tensor, held: HeldColumns) -> Tensor:
    heads, columns = held.keys.shape[:2]
    shaped = kept.ndim == 2 and len(kept) == heads and kept.shape[1] > 0
    if not shaped or not (
        bool((kept.diff(dim=1) > 0).all()) and 0 <= int(kept.min()) <= int(kept.max()) < columns
    ):
        raise EvaluationError(
            f"a cache policy must keep columns below {columns}, rising, for each of {heads} heads",
            f"layer {held.layer}: shape {tuple(kept.shape)}",
            "Its survivors() breaks the protocol.",
        )
    return kept
