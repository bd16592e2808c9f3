"""KV cache of one text that a policy cuts down after its forwards: texts scored and generated.

With a context a b c d, a policy that keeps the columns of a and d, and the continuation y z::

    prefill     a b c d      predicts y         the whole context is read, and is paid for
    cache       a     d      positions 0 3
    forward     y            predicts z         at position 4: it sees a d and itself

A policy that reads attention weights is asked after every 128 tokens of a longer text, so that no
weights of more queries are held at once. Nothing need go before the last of them.

Texts are generated one after the other: a policy may keep other columns in each. With a policy that
keeps the newest columns, the prompt a b c d and a budget of 3 columns::

    a b c d    read whole, predicts x     b c d stay
    x          predicts y                 c d x stay
    y          ...                        the last token chosen is never read

Shapes: T context tokens, G generated tokens that were read, H key/value heads, A attention heads, L
columns, W columns of a forward, D head size, d embedding size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from umim_core.backbone.attention_masks import eager_attention
from umim_core.backbone.backbone import Backbone
from umim_core.baselines.methods import CachePolicy, HeldColumns, read_behind
from umim_core.errors import EvaluationError
from umim_core.inference.batch import Batch, Prompts, check_room, exhaust, positions_taken
from umim_core.inference.choice import fresh_seed
from umim_core.inference.options import GenerateOptions
from umim_core.inference.outputs import GenerationState, Row
from umim_core.merging.likelihood import TokenScores, target_scores
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Advance
from umim_core.text.token_ids import Ints

WEIGHED_TOKENS: Final = 128  # 30 layers of 9 heads: 0.28 GB of float32 weights at 2,048 columns


class PolicyCache:
    """The KV cache of one text, whose columns a policy chooses whenever tokens were read."""

    def __init__(self, backbone: Backbone, policy: CachePolicy) -> None:
        self.backbone, self._policy = backbone, policy
        self._cache = DynamicCache()
        # Of a policy with a rotation, layer by layer: the keys [H, L, D] of the columns as forwards
        # wrote them, and the positions [H, L] that they were written at.
        self._written: dict[int, tuple[Tensor, Tensor]] = {}
        self.tokens = 0

    @property
    def columns(self) -> int:
        return self._cache.get_seq_length()

    @property
    def lengths(self) -> Tensor:
        """Columns of the only row [1] (int64, CPU)."""
        return torch.tensor([self.columns])

    def drop(self, columns: Sequence[Sequence[int]]) -> None:
        """Drop nothing: the policy does."""

    def read(self, ids: Tensor, budget: int) -> Tensor:
        """Read raw ids [W], at least one, then drop columns beyond the budget, at least 1.

        Hidden states [W', d] are of the tokens of the last forward; nothing was dropped before it.
        """
        weighs = self._policy.reads_attention
        parts = torch.split(ids, WEIGHED_TOKENS if weighs else len(ids))
        with eager_attention(self.backbone.model) if weighs else nullcontext():
            for part in parts[:-1]:
                _, attention = self._forward(part, weights=weighs)
                self._evict(self.columns, attention)
            hidden, attention = self._forward(parts[-1], weights=weighs)
        self._evict(budget, attention)
        return hidden

    def look_ahead(self, ids: Tensor) -> Tensor:
        """Return the hidden states [W, d] of a continuation of which no column stays."""
        hidden, _ = self._forward(ids)
        self._cache.crop(-len(ids))
        self.tokens -= len(ids)
        return hidden

    def _forward(self, ids: Tensor, *, weights: bool = False) -> tuple[Tensor, list[Tensor]]:
        first = self.tokens if self._policy.rotation is None else self.columns
        self.tokens += len(ids)
        return read_behind(self.backbone, ids, self._cache, first, attention=weights)

    def _evict(self, budget: int, attention: Sequence[Tensor]) -> None:
        for number, layer in enumerate(self._cache.layers):
            if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
                rule = "every layer must keep keys and values of its own"
                remedy = "Use a backbone without shared or recurrent layers."
                raise EvaluationError(rule, f"layer {number} has none", remedy)
            held = HeldColumns(number, layer.keys[0], attention[number] if attention else None)
            survivors = self._policy.survivors(held, budget)
            layer.keys = self._keys(number, held.keys, survivors)[None]
            layer.values = _columns(layer.values[0], survivors)[None]

    def _keys(self, layer: int, keys: Tensor, survivors: Tensor) -> Tensor:
        """Return the keys [H, K, D] that stay of [H, L, D], at their positions in the cache.

        Turned anew from the positions that they were written at, they gather no rounding.
        """
        rotation = self._policy.rotation
        if rotation is None:
            return _columns(keys, survivors)
        columns = torch.arange(keys.shape[1], device=keys.device)
        positions = columns.expand(len(keys), -1)
        if layer in self._written:
            before, written_at = self._written[layer]
            old = before.shape[1]
            keys = torch.cat([before, keys[:, old:]], dim=1)
            positions = torch.cat([written_at, positions[:, old:]], dim=1)
        keys, positions = _columns(keys, survivors), positions.gather(1, survivors)
        self._written[layer] = keys, positions
        return rotation.turn(keys, columns[: survivors.shape[1]] - positions)


def _columns(states: Tensor, columns: Tensor) -> Tensor:
    """Return columns [H, K, D] of states [H, L, D], by index [H, K]."""
    return states.gather(1, columns[..., None].expand(-1, -1, states.shape[-1]))


@torch.no_grad()
def score_evicted(
    context: Ints,
    endings: Sequence[Ints],
    backbone: Backbone,
    new_policy: Callable[[Ints], CachePolicy],
    budget: int,
) -> tuple[list[TokenScores], int]:
    """Score continuations of one context on the columns that a policy keeps of it.

    Context [T] and continuations have at least one token each. The first token of a continuation is
    predicted by the prefill, before anything is dropped. Returned are one score per continuation,
    in order, and the columns that stayed, of the ``budget`` that may.
    """
    what, longest = "a context and one continuation", len(context) + max(map(len, endings)) - 1
    backbone.check_positions(what, longest, EvaluationError, "Cut the context on the left.")
    backbone.check_window(longest)

    def tensor(ids: Ints) -> Tensor:
        return torch.from_numpy(ids).to(backbone.device)

    cache = PolicyCache(backbone, new_policy(context))
    hidden, scores = cache.read(tensor(context), budget), []
    for ending in endings:
        targets = tensor(ending)
        parts = [target_scores(hidden[-1:], targets[:1], backbone)]
        if len(ending) > 1:
            parts.append(target_scores(cache.look_ahead(targets[:-1]), targets[1:], backbone))
        scores.append(
            TokenScores(
                torch.cat([part.log_probs for part in parts]),
                torch.cat([part.greedy for part in parts]),
            )
        )
    return scores, cache.columns


Budget = Callable[[int], int]
"""Columns that may stay, at least 1, of a prompt and so many generated tokens G behind it."""


class PolicyReader:
    """Reads one prompt, and tokens behind it, into columns that a policy chooses."""

    def __init__(self, backbone: Backbone, policy: CachePolicy, budget: Budget) -> None:
        self.merged_model = MergedModel.without_merging(backbone)
        self._policy, self._budget = policy, budget
        self._prompt_tokens = 0

    def matcher(self, options: GenerateOptions) -> None:
        """Generated tokens stay raw."""

    def gathered(self, places: Sequence[tuple[PolicyCache, int]]) -> PolicyCache:
        return places[0][0]

    def begin(
        self,
        prompts: Prompts,
        options: GenerateOptions,
        past: GenerationState | None,
        several: bool,
    ) -> tuple[PolicyCache, Tensor]:
        [ids] = prompts.ids
        self._prompt_tokens = len(ids)
        cache = PolicyCache(self.merged_model.backbone, self._policy)
        return cache, self._read(ids, cache)

    def feed(
        self, step: Advance, tokens: Ints, columns: PolicyCache, positions: Tensor | None
    ) -> Tensor:
        return self._read(tokens, columns)

    def _read(self, ids: Ints, cache: PolicyCache) -> Tensor:
        allowed = self._budget(cache.tokens + len(ids) - self._prompt_tokens)
        backbone = self.merged_model.backbone
        return backbone.head(cache.read(torch.from_numpy(ids).to(backbone.device), allowed)[-1:])


@torch.no_grad()
def generate_evicted(
    prompts: Sequence[Ints],
    options: GenerateOptions,
    backbone: Backbone,
    new_policy: Callable[[Ints], CachePolicy],
    budgets: Sequence[Budget],
) -> list[Row]:
    """Generate a text after each prompt of raw ids [T_b], at least one each.

    ``options`` are as for the engine; their ``merge`` is ``none``, and nothing is streamed. The
    budget of a prompt is asked after it, and after each token that was read. Samples of a prompt
    lie side by side; ``cache_lengths`` has the columns after every forward.
    """
    config = options.check(MergedModel.without_merging(backbone), len(prompts))
    samples, new = options.samples, config.max_new_tokens or 0
    policies = [
        (ids, new_policy(ids), budget)
        for ids, budget in zip(prompts, budgets, strict=True)
        for _ in range(samples)
    ]
    needed = [_positions(ids, new, policy, budget) for ids, policy, budget in policies]
    longest = max(needed, default=0)
    check_room(backbone, longest, new)
    backbone.check_window(longest)
    if config.do_sample and options.seed is None:
        options = replace(options, seed=fresh_seed())  # one for all rows, as in a batch
    streams = range(len(policies)) if options.streams is None else options.streams
    alone, rows = replace(options, n=1, streams=None), list[Row]()
    for (ids, policy, budget), stream in zip(policies, streams, strict=True):
        batch = Batch(PolicyReader(backbone, policy, budget))
        drawn = replace(alone, streams=[stream]) if config.do_sample else alone
        rows += exhaust(batch.run([ids], drawn)).rows
    return rows


def _positions(ids: Ints, new: int, policy: CachePolicy, budget: Budget) -> int:
    tokens = positions_taken(len(ids), new)
    if policy.rotation is None or new < 2:
        return tokens
    allowed = budget(new - 2)  # before the last token that is read
    return min(tokens, max(len(ids), allowed + 1))
