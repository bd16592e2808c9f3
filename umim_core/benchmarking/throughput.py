"""Prefill and decode throughput, base against UMIM, in one process on one backbone.

Both sides run on the same engine and the same prompts, in alternating pairs (the order flips from
pair to pair); the speed-up is the median of the pairs' ratios. Throughput counts original tokens.
Matching, merging and packing belong to UMIM's time.

    rules         fixed-pairs: two raw tokens are always one unit, TR 50 % exactly
                  natural: the checkpoint's rules, TR as realised
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from transformers import GenerationConfig

from umim_core.backbone import Backbone
from umim_core.benchmarking.pairs import FixedPairs
from umim_core.benchmarking.roofline import ModelShape, Roofline, measure_peak, synchronize
from umim_core.errors import ConfigError, EvaluationError
from umim_core.merging.compress import SpanMerger
from umim_core.merging.engine import Engine
from umim_core.merging.outputs import EngineOutput, Forward
from umim_core.rules.matcher import Matcher

Ints = NDArray[np.int64]
Phase = Literal["prefill", "decode"]
RuleKind = Literal["fixed-pairs", "natural"]
DEFAULT_KINDS: Final[tuple[RuleKind, ...]] = ("fixed-pairs", "natural")


@dataclass(frozen=True)
class ThroughputRow:
    """One measured speed, base and UMIM side by side.

    Attributes:
        phase: Reading the prompt, or generating.
        rules: What was merged.
        prompt_tokens: Raw tokens of each prompt.
        new_tokens: Generated tokens per row.
        batch_size: Rows.
        token_reduction: Realised: of the prompts, or of prompt and generated tokens for decode.
        base_tokens_per_s: Original tokens per second, base model (median).
        umim_tokens_per_s: The same for UMIM.
        speedup: Median of the pairs' ratios.
        speedup_low: Their lower quartile.
        speedup_high: Their upper quartile.
        bound: Largest speed-up possible at this token reduction.
        pairs: Alternating pairs measured.
        base_flops_per_s: FLOP/s of the base model (median time), below the device's ceiling.
        umim_flops_per_s: The same for UMIM.
    """

    phase: Phase
    rules: RuleKind
    prompt_tokens: int
    new_tokens: int
    batch_size: int
    token_reduction: float
    base_tokens_per_s: float
    umim_tokens_per_s: float
    speedup: float
    speedup_low: float
    speedup_high: float
    bound: float
    pairs: int
    base_flops_per_s: float
    umim_flops_per_s: float

    def as_dict(self) -> dict[str, str | int | float]:
        """Return the fields by name."""
        return asdict(self)


@dataclass(frozen=True)
class Timing:
    """One run of the engine.

    Attributes:
        prefill: Seconds from the prompts' ids to their next-token logits.
        decode: Seconds for the forwards after that.
        output: What was generated.
    """

    prefill: float
    decode: float
    output: EngineOutput


def time_run(engine: Engine, prompts: Sequence[Ints], new_tokens: int) -> Timing:
    """Time one greedy generation that never ends early."""
    device = engine.backbone.device
    stamps: list[float] = []

    def stamp(_: Forward) -> None:
        synchronize(device)
        stamps.append(time.perf_counter())

    config = GenerationConfig(  # type: ignore[no-untyped-call]  # transformers' own
        max_new_tokens=new_tokens, do_sample=False
    )
    synchronize(device)
    start = time.perf_counter()
    output = engine.generate(prompts, config, observer=stamp)
    return Timing(stamps[0] - start, stamps[-1] - stamps[0], output)


def measure_throughput(
    backbone: Backbone,
    module: SpanMerger,
    matcher: Matcher,
    ids: Ints,
    *,
    prompt_lengths: Sequence[int] = (256, 512),
    new_tokens: int = 32,
    batch_size: int = 1,
    warmup: int = 2,
    pairs: int = 10,
    kinds: Sequence[RuleKind] = DEFAULT_KINDS,
    roofline: Roofline | None = None,
) -> list[ThroughputRow]:
    """Measure prefill and decode for every prompt length and kind of rules.

    Args:
        backbone: The frozen model.
        module: Makes the surrogates.
        matcher: The natural rules.
        ids: Text to cut prompts from [T], T >= batch_size * longest prompt.
        prompt_lengths: Raw tokens per prompt.
        new_tokens: Tokens generated per row, at least 2.
        batch_size: Rows.
        warmup: Untimed runs of each side.
        pairs: Alternating timed pairs.
        kinds: Which rules.
        roofline: The device's ceiling; measured before and after if None.

    Returns:
        A prefill and a decode row per prompt length and kind.

    Raises:
        ConfigError: If a size is out of range or the text is too short.
        EvaluationError: If a figure lies above the device's ceiling.
    """
    if min(new_tokens - 1, batch_size, warmup + 1, pairs, *prompt_lengths) < 1:
        raise ConfigError(
            "new_tokens must be at least 2, warmup 0, batch_size, pairs and prompt lengths 1",
            (new_tokens, warmup, batch_size, pairs, tuple(prompt_lengths)),
            "Raise what is too small.",
        )
    if len(ids) < batch_size * max(prompt_lengths):
        raise ConfigError(
            f"the text must hold {batch_size} prompts of {max(prompt_lengths)} tokens",
            f"{len(ids)} tokens",
            "Pass a longer text.",
        )
    base = Engine(backbone, None, None)
    matchers: dict[RuleKind, Matcher] = {"fixed-pairs": FixedPairs(), "natural": matcher}
    ceiling = roofline or measure_peak(backbone.device, backbone.dtype)
    measured = []
    for length in prompt_lengths:
        prompts = [ids[b * length : (b + 1) * length] for b in range(batch_size)]
        for kind in kinds:
            umim = Engine(backbone, module, matchers[kind])
            timed = _alternate(base, umim, prompts, new_tokens, warmup, pairs)
            measured.append((kind, length, timed))
    if roofline is None:  # a busy moment may have hidden the peak the first time
        again = measure_peak(backbone.device, backbone.dtype)
        ceiling = Roofline(max(ceiling.peak_flops, again.peak_flops))
    shape = ModelShape.of(backbone.model)
    return [
        row(shape, kind, length, new_tokens, timed, ceiling)
        for kind, length, timed in measured
        for row in (_prefill_row, _decode_row)
    ]


Pairs = list[tuple[Timing, Timing]]


def _alternate(
    base: Engine, umim: Engine, prompts: Sequence[Ints], new_tokens: int, warmup: int, pairs: int
) -> Pairs:
    for _ in range(warmup):
        time_run(base, prompts, new_tokens)
        time_run(umim, prompts, new_tokens)
    timed: Pairs = []
    for pair in range(pairs):
        if pair % 2:
            second = time_run(umim, prompts, new_tokens)
            timed.append((time_run(base, prompts, new_tokens), second))
        else:
            first = time_run(base, prompts, new_tokens)
            timed.append((first, time_run(umim, prompts, new_tokens)))
    return timed


def _prefill_row(
    shape: ModelShape, kind: RuleKind, length: int, new: int, timed: Pairs, ceiling: Roofline
) -> ThroughputRow:
    units = [row.cache_lengths[0] for row in timed[0][1].output.rows]
    work = shape.prefill_flops(length) * len(units), sum(map(shape.prefill_flops, units))
    seconds = [(b.prefill, u.prefill) for b, u in timed]
    mean = statistics.fmean(units)
    bound = shape.prefill_bound(length, mean)
    tokens = length * len(units)
    sizes = (length, new, len(units))
    return _row("prefill", kind, sizes, 1 - mean / length, tokens, seconds, work, bound, ceiling)


def _decode_row(
    shape: ModelShape, kind: RuleKind, length: int, new: int, timed: Pairs, ceiling: Roofline
) -> ThroughputRow:
    rows = timed[0][1].output.rows
    raw = length + (new - 1) / 2  # mean length of the base model's cache
    units = statistics.fmean(n for row in rows for n in row.cache_lengths)
    steps = len(rows) * (new - 1)
    work = shape.decode_flops(raw) * steps, shape.decode_flops(units) * steps
    seconds = [(b.decode, u.decode) for b, u in timed]
    bound = shape.decode_bound(raw, units, len(rows))
    sizes = (length, new, len(rows))
    return _row("decode", kind, sizes, 1 - units / raw, steps, seconds, work, bound, ceiling)


def _row(
    phase: Phase,
    kind: RuleKind,
    sizes: tuple[int, int, int],
    token_reduction: float,
    tokens: int,
    seconds: Sequence[tuple[float, float]],
    work: tuple[float, float],
    bound: float,
    ceiling: Roofline,
) -> ThroughputRow:
    base, umim = (statistics.median(side) for side in zip(*seconds, strict=True))
    if not base > 0 or not umim > 0:
        raise EvaluationError("a run must take time", (base, umim), "Time longer prompts.")
    ratios = [b / u for b, u in seconds]
    low, _, high = (float(q) for q in np.quantile(ratios, [0.25, 0.5, 0.75]))
    length, new, rows = sizes
    return ThroughputRow(
        phase=phase,
        rules=kind,
        prompt_tokens=length,
        new_tokens=new,
        batch_size=rows,
        token_reduction=token_reduction,
        base_tokens_per_s=tokens / base,
        umim_tokens_per_s=tokens / umim,
        speedup=statistics.median(ratios),
        speedup_low=low,
        speedup_high=high,
        bound=bound,
        pairs=len(ratios),
        base_flops_per_s=ceiling.check(f"base {phase} at {length} tokens", work[0], base),
        umim_flops_per_s=ceiling.check(f"UMIM {phase} at {length} tokens", work[1], umim),
    )
