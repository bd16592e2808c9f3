"""Timed generations: alternating pairs of base and UMIM on the same prompts.

Every pair has prompts of its own, cut from the text a little further on: the engine keeps the spans
it merged while decoding, and a repeated prompt would find all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from umim_core.config.evaluate import BenchmarkConfig
from umim_core.inference.engine import Engine
from umim_core.inference.request import Request
from umim_core.throughput.roofline import synchronize

Ints = NDArray[np.int64]
Continuation = Literal["greedy", "text"]
# All rules merge prompts and generated tokens, whatever a checkpoint's own bound of decoding is.
EVERYWHERE: Final = Request(decode_max_damage=math.inf)


@dataclass(frozen=True)
class Prompts:
    """Prompts of one run and, if they are forced on it, the ids that it generates.

    Attributes:
        ids: Raw ids per row [B, L].
        text: Ids to generate per row [B, new tokens]; None for the model's own choice.
    """

    ids: Ints
    text: Ints | None = None


@dataclass(frozen=True)
class Timing:
    """One run of the engine.

    Attributes:
        prefill: Seconds from the prompts' ids to the first token chosen.
        decode: Seconds for the tokens after that.
        cache_lengths: Units held after the prefill and after each fed token, per row [B, new].
    """

    prefill: float
    decode: float
    cache_lengths: Ints


@dataclass(frozen=True)
class Measured:
    """Base and UMIM on the same prompts, one run each per pair.

    Attributes:
        base: Runs of the base model.
        umim: Runs of UMIM.
        base_peak_bytes: Most device memory in use by a run of the base model; None on a CPU.
        umim_peak_bytes: The same for UMIM.
    """

    base: tuple[Timing, ...]
    umim: tuple[Timing, ...]
    base_peak_bytes: int | None
    umim_peak_bytes: int | None


class _Text(LogitsProcessor):
    """Let every row generate a given text, at the cost of one copy of its scores.

    The engine asks once per row and token, in order.
    """

    def __init__(self, text: Ints) -> None:
        self._ids = text.T.reshape(-1).tolist()  # step by step, rows side by side
        self._asked = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        forced = scores.clone()
        forced[:, self._ids[self._asked]] = torch.inf
        self._asked += 1
        return forced  # type: ignore[return-value]  # a float tensor like the scores


def cut_prompts(
    ids: Ints, sizes: tuple[int, int, int], run: int, continuation: Continuation
) -> Prompts:
    """Cut the prompts of one run out of a text that is read in a circle.

    Args:
        ids: The text [T].
        sizes: Rows, raw tokens per prompt, new tokens.
        run: Number of the run; each starts one continuation further on.
        continuation: Whether the rows generate what the model chooses, or what follows each prompt
            in the text.
    """
    rows, length, new = sizes
    starts = run * new + length * np.arange(rows)[:, None]
    prompts = np.take(ids, starts + np.arange(length), mode="wrap")
    if continuation == "greedy":
        return Prompts(prompts)
    return Prompts(prompts, np.take(ids, starts + length + np.arange(new), mode="wrap"))


def time_run(
    engine: Engine, prompts: Prompts, new_tokens: int, request: Request = EVERYWHERE
) -> Timing:
    """Time one greedy generation that never ends early; ``request`` says what merges."""
    config = GenerationConfig(  # type: ignore[no-untyped-call]  # transformers' own
        max_new_tokens=new_tokens, do_sample=False
    )
    forced = None if prompts.text is None else LogitsProcessorList([_Text(prompts.text)])
    synchronize(engine.backbone.device)
    asked = replace(request, logits_processor=forced)
    output = engine.generate(list(prompts.ids), config, asked)
    lengths = np.array([row.cache_lengths for row in output.rows], dtype=np.int64)
    return Timing(output.timings.first_token, output.timings.decode, lengths)


def alternate(
    base: Engine,
    umim: Engine,
    ids: Ints,
    sizes: tuple[int, int, int],
    config: BenchmarkConfig,
    continuation: Continuation,
    request: Request = EVERYWHERE,
) -> Measured:
    """Time alternating pairs; the order flips from pair to pair.

    Args:
        base: The engine without rules.
        umim: The engine with rules.
        ids: The text [T].
        sizes: Rows, raw tokens per prompt, new tokens.
        config: Warm-up and pairs.
        continuation: What the rows generate.
        request: What merges.
    """
    new = sizes[2]
    base_run, umim_run = (
        partial(time_run, engine, new_tokens=new, request=request) for engine in (base, umim)
    )
    for run in range(config.warmup):
        prompts = cut_prompts(ids, sizes, -1 - run, continuation)
        base_run(prompts)
        umim_run(prompts)
    pairs = []
    for run in range(config.pairs):
        prompts = cut_prompts(ids, sizes, run, continuation)
        if run % 2:
            second = umim_run(prompts)
            pairs.append((base_run(prompts), second))
        else:
            first = base_run(prompts)
            pairs.append((first, umim_run(prompts)))
    prompts = cut_prompts(ids, sizes, 0, continuation)
    return Measured(
        tuple(base for base, _ in pairs),
        tuple(umim for _, umim in pairs),
        peak_bytes(partial(base_run, prompts), base.backbone.device),
        peak_bytes(partial(umim_run, prompts), umim.backbone.device),
    )


def peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Return the most device memory in use during one more run, weights included.

    None on a CPU: a process cannot tell what a run needs from what earlier runs have freed.
    """
    if device.type != "cuda":
        return None
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return int(torch.cuda.max_memory_allocated(device))
