"""Prefill and decode throughput, base against UMIM, in one process on one backbone.

Both sides run on the same engine and the same prompts, in alternating pairs; the speed-up is the
median of the pairs' ratios. Throughput counts original tokens. Matching, merging and packing belong
to UMIM's time. Every pair has prompts of its own: the engine keeps the spans it merged while
decoding, and a repeated prompt would find all of them.

    fixed-pairs   a controlled token reduction; above 50 % by spans of four
    natural       all rules of the checkpoint, those above its bound of decoding, too
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LogitsProcessor, LogitsProcessorList

from umim_core.backbone.backbone import Backbone
from umim_core.config.evaluate import BenchmarkConfig
from umim_core.errors import ConfigError, EvaluationError, require
from umim_core.inference.engine import Engine
from umim_core.inference.options import GenerateOptions
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.grams import LONGEST
from umim_core.rules.matcher import Advance, Matcher, SuffixMatcher
from umim_core.rules.ruleset import RuleSet
from umim_core.text.token_ids import Ints
from umim_core.throughput.break_even import PHASES, ThroughputRow
from umim_core.throughput.roofline import ForwardCost, Roofline, measure_peak, synchronize

Continuation = Literal["greedy", "text"]
# All rules merge prompts and generated tokens, whatever a checkpoint's own bound of decoding is.
EVERYWHERE: Final = GenerateOptions(decode_max_damage=math.inf)
_PEAKS: Final = 20  # measured at most after the runs: other work hides a peak, none makes one


class RunShape(NamedTuple):
    rows: int
    length: int  # raw tokens of each prompt
    new_tokens: int


@dataclass(frozen=True)
class TimedPrompts:
    ids: Ints  # raw ones per row [B, L]
    text: Ints | None = None  # that is generated, if forced [B, new tokens]


@dataclass(frozen=True)
class Timing:
    """One run of the engine."""

    prefill: float  # seconds from the prompts' ids to the first token chosen
    decode: float  # those after that
    cache_lengths: Ints  # units held after the prefill and after each fed token, per row [B, new]


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


def cut_prompts(ids: Ints, shape: RunShape, run: int, continuation: Continuation) -> TimedPrompts:
    """Cut the prompts of one run out of a text [T] that is read in a circle.

    Each run starts one continuation further on. Rows generate what the model chooses, or what
    follows each prompt in the text.
    """
    rows, length, new = shape
    starts = run * new + length * np.arange(rows)[:, None]
    prompts = np.take(ids, starts + np.arange(length), mode="wrap")
    if continuation == "greedy":
        return TimedPrompts(prompts)
    return TimedPrompts(prompts, np.take(ids, starts + length + np.arange(new), mode="wrap"))


def time_run(
    engine: Engine, prompts: TimedPrompts, new_tokens: int, options: GenerateOptions = EVERYWHERE
) -> Timing:
    """Time one greedy generation that never ends early; ``options`` say what merges."""
    forced = None if prompts.text is None else LogitsProcessorList([_Text(prompts.text)])
    synchronize(engine.backbone.device)
    timed = replace(options, max_new_tokens=new_tokens, do_sample=False, logits_processor=forced)
    output = engine.generate(list(prompts.ids), timed)
    lengths = np.array([row.cache_lengths for row in output.rows], dtype=np.int64)
    return Timing(output.timings.first_token, output.timings.decode, lengths)


def _alternate(
    base: Engine,
    umim: Engine,
    ids: Ints,
    shape: RunShape,
    config: BenchmarkConfig,
    continuation: Continuation,
    options: GenerateOptions,
) -> tuple[list[tuple[Timing, Timing]], tuple[int | None, int | None]]:
    """Time alternating pairs of base and UMIM; the order flips from pair to pair.

    With the pairs comes the most device memory that a run of either takes.
    """
    sides = [
        partial(time_run, engine, new_tokens=shape.new_tokens, options=options)
        for engine in (base, umim)
    ]
    for run in range(config.warmup):
        prompts = cut_prompts(ids, shape, -1 - run, continuation)
        for time_side in sides:
            time_side(prompts)
    pairs = []
    for run in range(config.pairs):
        prompts = cut_prompts(ids, shape, run, continuation)
        timed = [time_side(prompts) for time_side in (sides[::-1] if run % 2 else sides)]
        first, second = timed[::-1] if run % 2 else timed
        pairs.append((first, second))
    prompts = cut_prompts(ids, shape, 0, continuation)
    peaks = [peak_bytes(partial(time_side, prompts), base.backbone.device) for time_side in sides]
    return pairs, (peaks[0], peaks[1])


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


_ROUNDING: Final = 1e-9  # so that ten tenths are one


def _merged(spans: Ints, share: float) -> NDArray[np.bool_]:
    before, after = (np.floor(n * share + _ROUNDING) for n in (spans, spans + 1))
    return np.asarray(after > before)


class _FixedSuffixes(SuffixMatcher):
    """Follow rows whose spans of some size, side by side, become units."""

    def __init__(self, rows: int, size: int, share: float) -> None:
        super().__init__(np.zeros(1, dtype=np.uint64), rows)
        self._share = share
        self._span = np.zeros((rows, size), dtype=np.int64)  # the one under way
        self._tokens = np.zeros(rows, dtype=np.int64)  # so far

    def advance(self, tokens: Ints, running: NDArray[np.bool_]) -> Advance:
        """Make a unit of each span that a running row's token completes, of their share."""
        size = self._span.shape[1]
        self._span[np.arange(len(tokens)), self._tokens % size] = tokens
        complete = running & (self._tokens % size == size - 1)
        unit = complete & _merged(self._tokens // size, self._share)
        spans = np.zeros((len(tokens), LONGEST), dtype=np.int64)
        spans[running, 0] = tokens[running]
        spans[unit, :size] = self._span[unit]
        self._tokens += running
        return Advance(unit * (size - 1), spans, running + unit * (size - 1))


class FixedSpans(Matcher):
    """Cut a text into spans of equal size, for a controlled token reduction.

    Pairs give up to 0.5, spans of four up to 0.75: a share of them becomes one unit each. At 0.5
    the ids 7 8 9 become the units (7,8) (9): starts 0 2, lengths 2 1.
    """

    def __init__(self, token_reduction: float = 0.5) -> None:
        super().__init__(RuleSet.from_spans([]))
        self._size = 2 if token_reduction <= 0.5 else LONGEST
        self._share = token_reduction * self._size / (self._size - 1)

    def segment_many(
        self, ids: NDArray[np.integer], offsets: Ints, *, threads: int = 1
    ) -> tuple[Ints, Ints, Ints]:
        """Cut many sequences, as ``Matcher`` does; what is no whole span stays raw."""
        sizes = np.diff(offsets)
        place = np.arange(len(ids)) - np.repeat(offsets[:-1], sizes)
        span, within = np.divmod(place, self._size)
        whole = (span + 1) * self._size <= np.repeat(sizes, sizes)
        starts = np.flatnonzero((within == 0) | ~whole | ~_merged(span, self._share))
        return starts, np.diff(starts, append=len(ids)), np.searchsorted(starts, offsets)

    def suffixes(self, rows: int) -> SuffixMatcher:
        return _FixedSuffixes(rows, self._size, self._share)


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

    Prompts are cut from a text of ids [T]. The text that follows each prompt, as ``continuation``,
    makes natural rules merge as in text where a model would loop. The device's ceiling is measured
    before and after if none is given. ``progress`` gets the settings so far and in all.
    """
    backbone = merged_model.backbone
    check_protocol(backbone, ids, config)
    ceiling = roofline or measure_peak(backbone.device, backbone.dtype)
    base = Engine(merged_model.base())
    matchers: dict[float | None, Matcher] = {  # by the token reduction that spans are made for
        asked: FixedSpans(asked) for asked in config.token_reductions
    }
    matchers[None] = merged_model.require_matcher()
    rules = {asked: Engine(merged_model.merging_by(m)) for asked, m in matchers.items()}
    sizes = product(config.batch_sizes, config.prompt_lengths)
    shapes = [RunShape(*of_prompts, config.new_tokens) for of_prompts in sizes]
    settings = list(product(shapes, rules.items()))
    measured = []
    for done, (shape, (asked, umim)) in enumerate(settings):
        if progress is not None:
            progress(done, len(settings))
        pairs = _alternate(base, umim, ids, shape, config, continuation, options)
        measured.append((shape, asked, *pairs))
    cost = ForwardCost.of(merged_model)

    def rows(ceiling: Roofline) -> list[ThroughputRow]:
        return [row for setting in measured for row in _rows(cost, ceiling, *setting)]

    for _ in range(_PEAKS if roofline is None else 0):
        again = measure_peak(backbone.device, backbone.dtype)
        ceiling = Roofline(max(ceiling.peak, again.peak))
        with suppress(EvaluationError):
            return rows(ceiling)
    return rows(ceiling)


def tokens_needed(config: BenchmarkConfig) -> int:
    return max(config.batch_sizes) * max(config.prompt_lengths)


def check_protocol(backbone: Backbone, ids: Ints, config: BenchmarkConfig) -> None:
    count, length = max(config.batch_sizes), max(config.prompt_lengths)
    rule = f"the text must hold {count} prompts of {length} tokens"
    remedy = "Give a longer text, or fewer or shorter prompts."
    require(len(ids) >= tokens_needed(config), ConfigError, rule, f"{len(ids)} tokens", remedy)
    most, longest = backbone.max_positions, length + config.new_tokens - 1  # the last is never fed
    rule = f"prompt and new tokens must fit the backbone's {most} positions"
    value, remedy = f"{length} + {config.new_tokens} tokens", "Choose shorter or fewer."
    require(most is None or longest <= most, ConfigError, rule, value, remedy)


def _rows(
    cost: ForwardCost,
    ceiling: Roofline,
    shape: RunShape,
    asked_reduction: float | None,
    pairs: list[tuple[Timing, Timing]],
    peaks: tuple[int | None, int | None],
) -> Iterator[ThroughputRow]:
    """Yield the rows of the three phases of one setting; all pairs are (base, UMIM)."""
    batch, length, new = shape
    raw, units = (
        np.stack([run.cache_lengths for run in side]) for side in zip(*pairs, strict=True)
    )
    # [pairs, B, new]; what a layer holds on average: below the merge depth it holds raw tokens
    columns = cost.columns(raw, units)
    read, raw_mean, unit_mean = float(units[..., 0].mean()), float(raw.mean()), float(units.mean())
    steps = batch * (new - 1)

    def read_work(of: Ints) -> float:
        """Return the FLOPs of reading all rows, of units per pair and row [pairs, B]."""
        each = zip(of.reshape(-1).tolist(), raw[..., 0].reshape(-1).tolist(), strict=True)
        return sum(cost.prefill_flops(*row) for row in each) / len(of)

    def held_bytes(of: NDArray[np.number]) -> int:
        """Return the bytes that all rows hold, of columns per layer, pair and row [pairs, B]."""
        return round(cost.kv_bytes(float(of.sum(axis=1).mean())))

    seconds = {
        "prefill": [(base.prefill, umim.prefill) for base, umim in pairs],
        "decode": [(base.decode, umim.decode) for base, umim in pairs],
        "request": [(b.prefill + b.decode, u.prefill + u.decode) for b, u in pairs],
    }
    reading = read_work(raw[..., 0]), read_work(units[..., 0])
    decoding = (
        cost.decode_flops(raw_mean) * steps,
        cost.decode_flops(cost.columns(raw_mean, unit_mean)) * steps,
    )
    both = reading[0] + decoding[0], reading[1] + decoding[1]
    bounds = cost.prefill_bound(length, read), cost.decode_bound(raw_mean, unit_mean, batch)
    times = [statistics.median(base for base, _ in seconds[part]) for part in ("prefill", "decode")]
    whole = sum(times) / (times[0] / bounds[0] + times[1] / bounds[1])
    last = 1.0 - float(units[..., -1].mean()) / float(raw[..., -1].mean())
    # Tokens, FLOPs of base and UMIM, largest speed-up, token reduction.
    facts = {
        "prefill": (length * batch, reading, bounds[0], 1.0 - read / length),
        "decode": (steps, decoding, bounds[1], 1.0 - unit_mean / raw_mean),
        "request": ((length + new) * batch, both, whole, last),
    }
    for phase in PHASES:
        tokens, work, bound, reduction = facts[phase]
        base, umim = (statistics.median(side) for side in zip(*seconds[phase], strict=True))
        ratios = [b / u for b, u in seconds[phase]]
        low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()
        place = 0 if phase == "prefill" else -1
        where = f"{phase} at {length} tokens"
        yield ThroughputRow(
            phase=phase,
            rules="natural" if asked_reduction is None else "fixed-pairs",
            asked_reduction=asked_reduction,
            prompt_tokens=length,
            new_tokens=new,
            batch_size=batch,
            token_reduction=reduction,
            base_seconds=base,
            umim_seconds=umim,
            base_tokens_per_s=tokens / base,
            umim_tokens_per_s=tokens / umim,
            speedup=median,
            speedup_low=low,
            speedup_high=high,
            bound=bound,
            pairs=len(ratios),
            base_flops_per_s=ceiling.check(f"base {where}", work[0], base),
            umim_flops_per_s=ceiling.check(f"UMIM {where}", work[1], umim),
            base_kv_bytes=held_bytes(raw[..., place]),
            umim_kv_bytes=held_bytes(columns[..., place]),
            base_peak_bytes=peaks[0],
            umim_peak_bytes=peaks[1],
        )
