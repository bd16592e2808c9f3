"""Sampled continuations of prompts, by transformers' own ``generate``.

Shapes: B prompts of a batch, k trajectories each, P tokens of the longest prompt, N new tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from umim_core.backbone.backbone import Backbone
from umim_core.backbone.devices import forked_generators
from umim_core.backbone.tokenizer_files import first_line
from umim_core.config.corpus import GeneratedCorpus
from umim_core.errors import GenerationError, require
from umim_core.inference.choice import end_ids

Ended = Literal["eos", "length"]


@dataclass(frozen=True)
class Trajectory:
    """One continuation of a prompt."""

    ids: list[int]
    ended: Ended


def sample_trajectories(
    backbone: Backbone,
    prompts: Sequence[Sequence[int]],
    options: GeneratedCorpus,
    seed: int,
    *,
    first: int = 0,
) -> list[list[Trajectory]]:
    """Sample k continuations of each prompt, in the order of the prompts.

    Prompts of like length share a batch. Each batch has its own seed, made from ``seed`` and the
    number of its first prompt, so equal arguments give equal tokens (on the CPU) whatever was
    sampled before. The global generators of the CPU and of the model's device stay as they are.
    """
    _check(backbone, prompts, options)
    sampled: dict[int, list[Trajectory]] = {}
    lengths = [len(prompt) for prompt in prompts]
    for batch in _batches(lengths, options, backbone.max_positions):
        derived = hashlib.sha256(f"{seed}:{first + batch[0]}".encode()).digest()[:8]
        batch_seed = int.from_bytes(derived) >> 1
        rows = _sample_batch(backbone, [prompts[i] for i in batch], options, batch_seed)
        sampled |= zip(batch, rows, strict=True)
    return [sampled[index] for index in range(len(prompts))]


def _check(backbone: Backbone, prompts: Sequence[Sequence[int]], options: GeneratedCorpus) -> None:
    limit, most = backbone.max_positions, options.max_tokens
    rule = f"max_tokens must be at most {limit}, the positions of {backbone.name}"
    fits = limit is None or most <= limit
    require(fits, GenerationError, rule, most, "Lower it, or choose another model.")
    rule, remedy = f"a prompt must have 1 to {most - 1} tokens", "Drop it, or raise max_tokens."
    for prompt in prompts:
        require(0 < len(prompt) < most, GenerationError, rule, len(prompt), remedy)


def _batches(
    lengths: Sequence[int], options: GeneratedCorpus, positions: int | None
) -> Iterator[list[int]]:
    """Yield the prompts of each batch, shortest first.

    A batch runs until its shortest prompt has all of its tokens, so its longest one may pass
    ``max_tokens`` and is cut afterwards; it must not pass the model's positions.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        reach = options.max_tokens - lengths[batch[0]] + lengths[index] if batch else 0
        too_far = positions is not None and reach > positions
        if len(batch) == options.batch_size or too_far:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _sample_batch(
    backbone: Backbone, prompts: Sequence[Sequence[int]], options: GeneratedCorpus, seed: int
) -> list[list[Trajectory]]:
    model: Any = backbone.model  # of a class that generates, as all causal ones
    width = max(map(len, prompts))
    ends = end_ids(backbone)
    filler = ends[0] if ends else 0  # masked before a prompt, cut off behind an end
    ids = torch.full((len(prompts), width), filler)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    config = GenerationConfig(  # type: ignore[no-untyped-call]  # transformers' own
        do_sample=True,
        top_p=options.top_p,
        top_k=0,  # transformers' default is 50
        temperature=options.temperature,
        num_return_sequences=options.trajectories,
        max_new_tokens=options.max_tokens - min(map(len, prompts)),
        eos_token_id=ends or None,
        pad_token_id=filler,
    )
    device = backbone.device
    with forked_generators(device), _settings_of_ours_alone(model):
        torch.manual_seed(seed)
        try:
            out: Tensor = model.generate(
                inputs=ids.to(device),
                attention_mask=mask.to(device),
                generation_config=config,
                logits_processor=LogitsProcessorList([_FiniteLogits()]),
            )
        except torch.OutOfMemoryError as error:
            raise GenerationError(
                f"{device} must have memory for {len(ids) * options.trajectories} sequences of "
                f"{options.max_tokens} tokens",
                first_line(error),
                "Lower batch_size.",
            ) from error
    new = out[:, width:].tolist()
    k = options.trajectories
    return [
        [_cut(row, options.max_tokens - len(prompt), ends) for row in new[i * k : (i + 1) * k]]
        for i, prompt in enumerate(prompts)
    ]


class _FiniteLogits(LogitsProcessor):
    """Refuse logits that nothing can be sampled from, as of float16 that overflowed."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        if len(others := scores[~torch.isfinite(scores)]):
            found = f"{float(others[0])} after {input_ids.shape[1]} tokens"
            raise GenerationError("logits must be finite", found, "Use bfloat16 or float32.")
        return scores


@contextmanager
def _settings_of_ours_alone(model: Any) -> Iterator[None]:
    """Keep ``generate`` from adding settings of the model's file, a repetition penalty say."""
    stored = model.generation_config
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]  # theirs
    try:
        yield
    finally:
        model.generation_config = stored


def _cut(row: list[int], room: int, ends: Sequence[int]) -> Trajectory:
    ids = row[:room]
    for place, token in enumerate(ids):
        if token in ends:
            return Trajectory(ids[:place], "eos")
    return Trajectory(ids, "length")
