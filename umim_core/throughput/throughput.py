"""Prefill and decode throughput, base against UMIM, in one process on one backbone.

Both sides run on the same engine and the same prompts, in alternating pairs; the speed-up is the
median of the pairs' ratios. Throughput counts original tokens. Matching, merging and packing belong
to UMIM's time. Every pair has prompts of its own, cut from the text a little further on: the engine
keeps the spans it merged while decoding, and a repeated prompt would find all of them.

    rules         fixed-pairs: a controlled token reduction; 50 %: two raw tokens are one unit
                  natural: all rules of the checkpoint, those above its bound of decoding, too;
                  token reduction as realised
    phases        prefill: up to the first token; decode: after it; request: both
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LogitsProcessor, LogitsProcessorList

from umim_core.backbone.backbone import Backbone
from umim_core.config.evaluate import BenchmarkConfig
from umim_core.errors import ConfigError, EvaluationError
from umim_core.inference.engine import Engine
from umim_core.inference.options import GenerateOptions
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.grams import LONGEST
from umim_core.rules.matcher import Advance, Matcher, SuffixMatcher
from umim_core.rules.ruleset import RuleSet
from umim_core.text.token_ids import Ints
from umim_core.throughput.break_even import Phase, ThroughputRow
from umim_core.throughput.roofline import ModelShape, Roofline, measure_peak, synchronize

Continuation = Literal["greedy", "text"]
# All rules merge prompts and generated tokens, whatever a checkpoint's own bound of decoding is.
EVERYWHERE: Final = GenerateOptions(decode_max_damage=math.inf)


@dataclass(frozen=True)
class Prompts:
    """Raw ids per row [B, L] and, if forced, the ids that are generated [B, new tokens]."""

    ids: Ints
    text: Ints | None = None


@dataclass(frozen=True)
class Timing:
    """One run of the engine.

    ``prefill`` are the seconds from the prompts' ids to the first token chosen, ``decode`` those
    after that; ``cache_lengths`` the units held after the prefill and after each fed token, per row
    [B, new].
    """

    prefill: float
    decode: float
    cache_lengths: Ints


@dataclass(frozen=True)
class Measured:
    """Base and UMIM on the same prompts, one run each per pair.

    Peaks are the most device memory in use by a run; None on a CPU.
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
    """Cut the prompts of one run out of a text [T] that is read in a circle.

    ``sizes`` are rows, raw tokens per prompt and new tokens. Each run starts one continuation
    further on. Rows generate what the model chooses, or what follows each prompt in the text.
    """
    rows, length, new = sizes
    starts = run * new + length * np.arange(rows)[:, None]
    prompts = np.take(ids, starts + np.arange(length), mode="wrap")
    if continuation == "greedy":
        return Prompts(prompts)
    return Prompts(prompts, np.take(ids, starts + length + np.arange(new), mode="wrap"))


def time_run(
    engine: Engine, prompts: Prompts, new_tokens: int, options: GenerateOptions = EVERYWHERE
) -> Timing:
    """Time one greedy generation that never ends early; ``options`` say what merges."""
    forced = None if prompts.text is None else LogitsProcessorList([_Text(prompts.text)])
    synchronize(engine.backbone.device)
    timed = replace(options, max_new_tokens=new_tokens, do_sample=False, logits_processor=forced)
    output = engine.generate(list(prompts.ids), timed)
    lengths = np.array([row.cache_lengths for row in output.rows], dtype=np.int64)
    return Timing(output.timings.first_token, output.timings.decode, lengths)


def alternate(
    base: Engine,
    umim: Engine,
    ids: Ints,
    sizes: tuple[int, int, int],
    config: BenchmarkConfig,
    continuation: Continuation,
    options: GenerateOptions = EVERYWHERE,
) -> Measured:
    """Time alternating pairs; the order flips from pair to pair.

    ``umim`` is the engine with rules, ``base`` the one without. Ids are the text [T], sizes as of
    `cut_prompts`.
    """
    new = sizes[2]
    base_run, umim_run = (
        partial(time_run, engine, new_tokens=new, options=options) for engine in (base, umim)
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


Sizes = tuple[int, int, int]


_ROUNDING: Final = 1e-9  # so that ten tenths are one


def _merged(pairs: Ints, share: float) -> NDArray[np.bool_]:
    before, after = (np.floor(n * share + _ROUNDING) for n in (pairs, pairs + 1))
    return np.asarray(after > before)


class PairSuffixes(SuffixMatcher):
    """Follow rows whose pairs of tokens become units."""

    def __init__(self, rows: int, share: float) -> None:
        super().__init__(np.zeros(1, dtype=np.uint64), rows)
        self._share = share
        self._single = np.full(rows, -1, dtype=np.int64)  # an id that waits for its partner
        self._pairs = np.zeros(rows, dtype=np.int64)  # complete ones so far

    def advance(self, tokens: Ints, running: NDArray[np.bool_]) -> Advance:
        """Pair each running row's token with the one before, unless that is in a pair already."""
        complete = running & (self._single >= 0)
        unit_mean = complete & _merged(self._pairs, self._share)
        spans = np.zeros((len(tokens), LONGEST), dtype=np.int64)
        spans[running, 0] = tokens[running]
        spans[unit_mean, 0], spans[unit_mean, 1] = self._single[unit_mean], tokens[unit_mean]
        self._single = np.where(complete, -1, np.where(running, tokens, self._single))
        self._pairs += complete
        return Advance(unit_mean.astype(np.int64), spans, running.astype(np.int64) + unit_mean)


class FixedPairs(Matcher):
    """Cut a text into pairs of raw tokens, for a controlled token reduction, at most 0.5.

    Twice that share of the pairs becomes one unit each. The ids 7 8 9 become the units (7,8) (9):
    starts 0 2, lengths 2 1.
    """

    def __init__(self, token_reduction: float = 0.5) -> None:
        if not 0.0 < token_reduction <= 0.5:
            raise ConfigError(
                "pairs give a token reduction above 0 and at most 0.5",
                token_reduction,
                "Choose one between.",
            )
        super().__init__(RuleSet.from_spans([]))
        self._share = 2.0 * token_reduction

    def segment(self, ids: NDArray[np.integer]) -> tuple[Ints, Ints]:
        """Return starts [S] and lengths [S] of the units; an odd last token stays raw."""
        second = np.zeros(len(ids), dtype=bool)  # tokens behind the first of a unit
        count = len(ids) // 2
        second[1 : 2 * count : 2] = _merged(np.arange(count), self._share)
        starts = np.flatnonzero(~second).astype(np.int64)
        return starts, np.diff(starts, append=len(ids))

    def segment_many(
        self, ids: NDArray[np.integer], offsets: Ints, *, threads: int = 1
    ) -> tuple[Ints, Ints, Ints]:
        """Cut many sequences in this thread; no pair crosses a border."""
        parts = [self.segment(ids[a:b]) for a, b in pairwise(offsets.tolist())]
        empty = np.zeros(0, dtype=np.int64)
        starts = [part + first for (part, _), first in zip(parts, offsets[:-1], strict=True)]
        lengths = [part for _, part in parts]
        borders = np.cumsum([0, *(len(part) for part in lengths)]).astype(np.int64)
        return np.concatenate([empty, *starts]), np.concatenate([empty, *lengths]), borders

    def contains(self, span: Sequence[int]) -> bool:
        return len(span) == 2

    def suffixes(self, rows: int) -> PairSuffixes:
        return PairSuffixes(rows, self._share)


@dataclass(frozen=True)
class _Phase:
    """Measurements of one phase; tuples are (base, UMIM).

    Original tokens are those of all rows, seconds per pair, FLOPs at least, the bound the largest
    speed-up possible, bytes those of keys and values at its end.
    """

    name: Phase
    tokens: int
    seconds: list[tuple[float, float]]
    work: tuple[float, float]
    bound: float
    token_reduction: float
    kv_bytes: tuple[int, int]


def measure_throughput(
    merged_model: MergedModel,
    ids: Ints,
    config: BenchmarkConfig,
    *,
    continuation: Continuation = "greedy",
    roofline: Roofline | None = None,
    options: GenerateOptions = EVERYWHERE,
    progress: Callable[[int, int], None] | None = None,
) -> list[ThroughputRow]:
    """Measure every batch size, prompt length and kind of rules: a row for each of the phases.

    Args:
        merged_model: The model with its natural rules.
        ids: Text to cut prompts from [T], at least the tokens of the largest batch of prompts.
        config: The protocol.
        continuation: What the rows generate: what the model chooses, or the text that follows each
            prompt. The latter makes natural rules merge as in text where a model would loop.
        roofline: The device's ceiling; measured before and after if None.
        options: What merges: everything by all rules, unless it says otherwise.
        progress: Called with the settings measured so far and in all.
    """
    backbone = merged_model.backbone
    _check(backbone, ids, config)
    ceiling = roofline or measure_peak(backbone.device, backbone.dtype)
    base = Engine(merged_model.base())
    matchers: dict[float | None, Matcher] = {  # by the token reduction that pairs are made for
        asked: FixedPairs(asked) for asked in config.token_reductions
    }
    matchers[None] = merged_model.require_matcher()
    rules = {asked: Engine(merged_model.merging_by(m)) for asked, m in matchers.items()}
    shapes = product(config.batch_sizes, config.prompt_lengths, [config.new_tokens])
    settings = list(product(shapes, rules.items()))
    measured = []
    for done, (sizes, (asked, umim)) in enumerate(settings):
        if progress is not None:
            progress(done, len(settings))
        pairs = alternate(base, umim, ids, sizes, config, continuation, options)
        measured.append((sizes, asked, pairs))
    if roofline is None:  # a busy moment may have hidden the peak the first time
        again = measure_peak(backbone.device, backbone.dtype)
        ceiling = Roofline(max(ceiling.peak_flops, again.peak_flops))
    shape = ModelShape.of(backbone.model, merged_model.merge_depth)
    return [
        _row(phase, asked, sizes, pairs, ceiling)
        for sizes, asked, pairs in measured
        for phase in _phases(shape, sizes, pairs)
    ]


def tokens_needed(config: BenchmarkConfig) -> int:
    return max(config.batch_sizes) * max(config.prompt_lengths)


def _check(backbone: Backbone, ids: Ints, config: BenchmarkConfig) -> None:
    if len(ids) < tokens_needed(config):
        raise ConfigError(
            f"the text must hold {max(config.batch_sizes)} prompts of "
            f"{max(config.prompt_lengths)} tokens",
            f"{len(ids)} tokens",
            "Give a longer text, or fewer or shorter prompts.",
        )
    longest = max(config.prompt_lengths) + config.new_tokens - 1  # the last token is never fed
    if backbone.max_positions is not None and longest > backbone.max_positions:
        raise ConfigError(
            f"prompt and new tokens must fit the backbone's {backbone.max_positions} positions",
            f"{max(config.prompt_lengths)} + {config.new_tokens} tokens",
            "Choose shorter prompts or fewer new tokens.",
        )


def _phases(shape: ModelShape, sizes: Sizes, measured: Measured) -> list[_Phase]:
    batch, length, new = sizes
    pairs = list(zip(measured.base, measured.umim, strict=True))
    raw, units = (
        np.stack([run.cache_lengths for run in runs]) for runs in (measured.base, measured.umim)
    )  # [pairs, B, new]
    # what a layer holds on average: below the merge depth it holds raw tokens
    columns = shape.columns(raw, units)
    first, last = (
        (_kv_bytes(shape, raw[..., at]), _kv_bytes(shape, columns[..., at])) for at in (0, -1)
    )
    before = float(units[..., 0].mean())
    prefill = _Phase(
        name="prefill",
        tokens=length * batch,
        seconds=[(b.prefill, u.prefill) for b, u in pairs],
        work=(
            _prefill_flops(shape, raw[..., 0], raw[..., 0]),
            _prefill_flops(shape, units[..., 0], raw[..., 0]),
        ),
        bound=shape.prefill_bound(length, before),
        token_reduction=1.0 - before / length,
        kv_bytes=first,
    )
    steps, raw_mean, unit_mean = batch * (new - 1), float(raw.mean()), float(units.mean())
    decode = _Phase(
        name="decode",
        tokens=steps,
        seconds=[(b.decode, u.decode) for b, u in pairs],
        work=(
            shape.decode_flops(raw_mean) * steps,
            shape.decode_flops(shape.columns(raw_mean, unit_mean)) * steps,
        ),
        bound=shape.decode_bound(raw_mean, unit_mean, batch),
        token_reduction=1.0 - unit_mean / raw_mean,
        kv_bytes=last,
    )
    parts = [statistics.median(base for base, _ in part.seconds) for part in (prefill, decode)]
    request = _Phase(
        name="request",
        tokens=(length + new) * batch,
        seconds=[(b.prefill + b.decode, u.prefill + u.decode) for b, u in pairs],
        work=(prefill.work[0] + decode.work[0], prefill.work[1] + decode.work[1]),
        bound=sum(parts) / (parts[0] / prefill.bound + parts[1] / decode.bound),
        token_reduction=1.0 - float(units[..., -1].mean()) / float(raw[..., -1].mean()),
        kv_bytes=last,
    )
    return [prefill, decode, request]


def _kv_bytes(shape: ModelShape, columns: NDArray[np.number]) -> int:
    """Return the bytes that all rows hold, of columns per layer, pair and row [pairs, B]."""
    return round(shape.kv_bytes(float(columns.sum(axis=1).mean())))


def _prefill_flops(shape: ModelShape, units: Ints, raw: Ints) -> float:
    """Return the FLOPs of reading all rows, of units and tokens per pair and row [pairs, B]."""
    pairs = zip(units.reshape(-1).tolist(), raw.reshape(-1).tolist(), strict=True)
    return sum(shape.prefill_flops(*pair) for pair in pairs) / len(units)


def _row(
    phase: _Phase, asked: float | None, sizes: Sizes, measured: Measured, ceiling: Roofline
) -> ThroughputRow:
    base, umim = (statistics.median(side) for side in zip(*phase.seconds, strict=True))
    if not base > 0 or not umim > 0:
        raise EvaluationError("a run must take time", (base, umim), "Time longer prompts.")
    ratios = [b / u for b, u in phase.seconds]
    low, median, high = (float(q) for q in np.quantile(ratios, [0.25, 0.5, 0.75]))
    batch, length, new = sizes
    where = f"{phase.name} at {length} tokens"
    return ThroughputRow(
        phase=phase.name,
        rules="natural" if asked is None else "fixed-pairs",
        asked_reduction=asked,
        prompt_tokens=length,
        new_tokens=new,
        batch_size=batch,
        token_reduction=phase.token_reduction,
        base_seconds=base,
        umim_seconds=umim,
        base_tokens_per_s=phase.tokens / base,
        umim_tokens_per_s=phase.tokens / umim,
        speedup=median,
        speedup_low=low,
        speedup_high=high,
        bound=phase.bound,
        pairs=len(ratios),
        base_flops_per_s=ceiling.check(f"base {where}", phase.work[0], base),
        umim_flops_per_s=ceiling.check(f"UMIM {where}", phase.work[1], umim),
        base_kv_bytes=phase.kv_bytes[0],
        umim_kv_bytes=phase.kv_bytes[1],
        base_peak_bytes=measured.base_peak_bytes,
        umim_peak_bytes=measured.umim_peak_bytes,
    )
