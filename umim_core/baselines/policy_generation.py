"""Texts generated on a KV cache that a policy cuts down after the prompt and after every token.

With a policy that keeps the newest columns, the prompt a b c d and a budget of 3 columns::

    a b c d    read whole, predicts x     b c d stay
    x          predicts y                 c d x stay
    y          ...                        the last token chosen is never read

Rows are generated one after the other: a policy may keep other columns in each.

Shapes: T prompt tokens, G generated tokens that were read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import GenerationConfig

from umim_core.backbone.attention_masks import check_attention_window
from umim_core.backbone.backbone import Backbone
from umim_core.baselines.eviction import PolicyCache
from umim_core.baselines.methods import CachePolicy, Ints
from umim_core.errors import GenerationError
from umim_core.inference.outputs import RowOutput
from umim_core.inference.prompts import check_room
from umim_core.inference.request import Request, check_generation_config, samples_per_prompt
from umim_core.inference.rows import GeneratedUnits, Row, choose_tokens, record_forward
from umim_core.inference.sampling import TokenChooser, fresh_seed
from umim_core.inference.stopping import Stopper

Budget = Callable[[Ints, int], int]
"""Columns that may stay, at least 1, of a prompt [T] and so many generated tokens G behind it."""


@torch.no_grad()
def generate_evicted(
    prompts: Sequence[Ints],
    config: GenerationConfig,
    request: Request,
    backbone: Backbone,
    new_policy: Callable[[Ints], CachePolicy],
    budget: Budget,
) -> list[RowOutput]:
    """Generate a text after each prompt.

    Args:
        prompts: Raw ids per prompt [T_b], at least one each.
        config: As for the engine.
        request: As for the engine; nothing is merged or streamed.
        backbone: The frozen model.
        new_policy: Makes the policy of a text, given the raw ids of its prompt.
        budget: Columns that may stay after the prompt, and after each token that was read.

    Returns:
        The rows, samples of a prompt side by side; ``cache_lengths`` has the columns after every
        forward.

    Raises:
        EvaluationError: If the policy breaks its protocol.
        GenerationError: If an option is not supported, or a row takes more positions than the
            backbone or its attention window has: those of prompt and new tokens, or, where a policy
            turns what stays to positions inside the cache, of the prompt and of the columns.
    """
    check_generation_config(config)
    samples, new = samples_per_prompt(config), config.max_new_tokens or 0
    request.check(backbone.vocab_size, len(prompts) * samples)
    _check_plain(request)
    policies = [(ids, new_policy(ids)) for ids in prompts for _ in range(samples)]
    longest = max((_positions(ids, new, one, budget) for ids, one in policies), default=0)
    check_room(backbone, longest, new, request.overlong)
    check_attention_window(backbone.model.config, longest)
    if config.do_sample and request.seed is None:
        request = replace(request, seed=fresh_seed())  # one for all rows, as in a batch
    streams = range(len(prompts) * samples) if request.streams is None else request.streams
    return [
        _row(ids, stream, config, request, PolicyCache(backbone, policy), budget)
        for (ids, policy), stream in zip(policies, streams, strict=True)
    ]


def _positions(ids: Ints, new: int, policy: CachePolicy, budget: Budget) -> int:
    """Return the positions that a row takes at most; the last token chosen is never read."""
    tokens = len(ids) + new - 1
    if policy.rotation is None or new < 2:
        return tokens
    held = budget(ids, new - 2)  # before the last token that is read
    return min(tokens, max(len(ids), held + 1))


def _row(
    ids: Ints,
    stream: int,
    config: GenerationConfig,
    request: Request,
    cache: PolicyCache,
    budget: Budget,
) -> RowOutput:
    """Generate one text after a prompt [T], on its empty cache."""
    backbone = cache.backbone
    row = Row(ids.tolist(), 0, len(ids), (np.arange(len(ids)), np.ones(len(ids), dtype=np.int64)))
    chooser = TokenChooser(
        config,
        [len(ids)],
        request.seed,
        request.logits_processor,
        streams=[stream],
        device=backbone.device,
    )
    stopper = Stopper(config, backbone.tokenizer, request.stopping_criteria)
    tokens = ids
    while True:
        allowed = budget(ids, len(row.ids))
        hidden = cache.read(torch.from_numpy(tokens).to(backbone.device), allowed)
        logits = backbone.head(hidden[-1:])
        record_forward([row], logits, torch.tensor([cache.columns]), request.observer)
        tokens = choose_tokens([row], logits, chooser, stopper, request.logprobs)
        if row.stop_reason is not None:
            return row.output(GeneratedUnits(None, 1), 0, request.logprobs is not None)


def _check_plain(request: Request) -> None:
    """Refuse options of the engine that a policy's rows do not have."""
    asked = {
        "merge": request.merge != "none",
        "span_eviction": request.span_eviction is not None,
        "streamer": request.streamer is not None,
        "overlong='truncate'": request.overlong == "truncate",
    }
    if refused := [name for name, is_set in asked.items() if is_set]:
        raise GenerationError(
            "a cache policy generates raw tokens, whole prompts, and no stream",
            ", ".join(refused),
            "Leave it out; merge is 'none'.",
        )
