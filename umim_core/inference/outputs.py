"""Outputs of the engine: rows, times, the state for another turn, and what it shows meanwhile.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from umim_core.config.form import Merge
from umim_core.errors import GenerationError
from umim_core.inference.stopping import StopReason
from umim_core.inference.unit_cache import CacheMark, UnitCache
from umim_core.merging.merged_model import MergedModel

Spans = tuple[tuple[int, int], ...]
TopTokens = tuple[tuple[int, float], ...]


@dataclass
class GenerationState:
    """The cache of a request and what stands in it; one turn can continue it.

    The last token of a row was chosen but never fed; the next turn feeds it first. A state holds
    its cache's memory until it is continued, released or forgotten. A turn that fails or is
    abandoned gives the state back as it was. One thread at a time may continue it.
    """

    raw_ids: tuple[tuple[int, ...], ...]
    _cache: UnitCache | None = field(repr=False)
    _merged_model: MergedModel = field(repr=False)
    _held: CacheMark | None = field(default=None, repr=False)
    all_fed: bool = False

    @property
    def fed_ids(self) -> tuple[tuple[int, ...], ...]:
        """Raw ids of each row that the cache holds."""
        return self.raw_ids if self.all_fed else tuple(ids[:-1] for ids in self.raw_ids)

    @property
    def unfed(self) -> list[int] | None:
        """The last token of each row, where it was not fed."""
        return None if self.all_fed else [ids[-1] for ids in self.raw_ids]

    @property
    def cache_lengths(self) -> tuple[int, ...]:
        """Units held per row; empty once the state was continued or released."""
        return () if self._cache is None else tuple(self._cache.lengths.tolist())

    def check(self, rows: int, merged_model: MergedModel) -> None:
        """Refuse a turn that cannot continue the state."""
        if self._cache is None:
            raise GenerationError(
                "a state can be continued once",
                "it was continued or released, or spans were evicted from it",
                "Use the state of the newest output.",
            )
        backbone, own = merged_model.backbone, self._merged_model
        form = (merged_model.unit_positions, merged_model.merge_depth)
        if backbone is not own.backbone or form != (own.unit_positions, own.merge_depth):
            raise GenerationError(
                "a state can be continued by the backbone, unit positions and merge depth that "
                "made it",
                f"{backbone.name or 'another backbone'}, {form[0]}, depth {form[1]}",
                "Continue it with the same loaded model.",
            )
        if rows != len(self.raw_ids):
            raise GenerationError(
                "a continued state needs one prompt per row",
                f"{rows} prompts, {len(self.raw_ids)} rows",
                "Pass as many prompts as the output has rows.",
            )

    def take(self) -> UnitCache:
        """Hand the cache over; call ``check`` before."""
        assert self._cache is not None  # noqa: S101  check
        self._held = self._cache.mark()
        cache, self._cache = self._cache, None
        return cache

    def give_back(self, cache: UnitCache) -> None:
        """Take the cache of a failed turn back; a turn writes behind what it was given only."""
        assert self._held is not None  # noqa: S101  take
        cache.restore(self._held)
        self._cache = cache

    def release(self) -> None:
        """Give the cache's memory up; the state cannot be continued any more."""
        self._cache = None


@dataclass(frozen=True)
class Prefix:
    """A text in the cache, which any number of requests continue: ``generate(..., past=prefix)``.

    A request takes it for all of its prompts. It copies the cache when it writes first, and never
    writes into this one, so several threads may continue a prefix at once.
    """

    raw_ids: tuple[int, ...] = field(repr=False)
    spans: Spans = field(repr=False)
    _cache: UnitCache = field(repr=False)
    _merged_model: MergedModel = field(repr=False)

    def __repr__(self) -> str:
        """Return its size in tokens and units."""
        return f"Prefix({len(self.raw_ids)} tokens, {self.cache_length} units)"

    @property
    def cache_length(self) -> int:
        """Units that it holds."""
        return int(self._cache.lengths[0])

    @property
    def token_reduction(self) -> float:
        """(raw tokens - units) / raw tokens."""
        return 1.0 - self.cache_length / len(self.raw_ids)

    def fork(self, rows: int) -> GenerationState:
        """Return a state of some equal rows that begins as the prefix; nothing is copied yet."""
        cache = self._cache.forked(rows)
        return GenerationState((self.raw_ids,) * rows, cache, self._merged_model, all_fed=True)


class LapClock:
    """Seconds in laps, the first of which begins at once."""

    def __init__(self) -> None:
        self.laps: list[float] = []
        self.start()

    def start(self) -> None:
        """Begin a lap."""
        self._began = time.perf_counter()

    def stop(self) -> None:
        """End it."""
        self.laps.append(time.perf_counter() - self._began)


@dataclass(frozen=True)
class RowOutput:
    """One generated row.

    Attributes:
        ids: Generated raw ids; an end-of-sequence id that ended the row is included.
        prompt_ids: The raw ids that were prefilled: the prompt, behind an earlier turn's last token
            where a state was continued.
        prompt_units: Units they were prefilled as.
        prompt_spans: Their merged spans as (start, length) in raw prompt tokens. One that border
            matching took back is left out.
        generated_spans: Merged spans among the generated tokens that were fed (all but the last).
            With border matching a start may be negative: the span begins in the prompt.
        cache_lengths: Units in the cache after the prefill and after each fed token; as many
            entries as generated ids. A continued state counts from what it held.
        logprobs: The model's log-probability of each generated id, before any processor; the most
            probable (id, log-probability) at each step are ``top_logprobs``. None unless asked for.
    """

    ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    prompt_units: int
    prompt_spans: Spans
    generated_spans: Spans
    cache_lengths: tuple[int, ...]
    stop_reason: StopReason
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[TopTokens, ...] | None = None

    @property
    def prompt_length(self) -> int:
        """Raw prompt tokens."""
        return len(self.prompt_ids)

    @property
    def token_reduction(self) -> float:
        """(raw tokens - units) / raw tokens of the prompt."""
        return (self.prompt_length - self.prompt_units) / self.prompt_length

    @property
    def gen_kv_reduction(self) -> float:
        """1 - U_T / T: entries saved at the end among the T generated tokens fed; 0 if T = 0.

        Above 1 where border matching took more units of the prompt back than the tokens added, or
        span eviction dropped more columns than that, old spans of the prompt included.

        Source: paper, "Generation Quality" (Gen-KV TR).
        """
        fed = len(self.ids) - 1
        return (fed - self.cache_lengths[-1] + self.cache_lengths[0]) / fed if fed else 0.0

    @property
    def cumulative_kv_reduction(self) -> float:
        """1 - sum U_t / sum t over the T generated tokens fed; 0 if T = 0.

        Source: paper, "Generation Quality" (cumulative KV TR).
        """
        fed = len(self.ids) - 1
        held = sum(self.cache_lengths[1:]) - fed * self.cache_lengths[0]
        return 1.0 - held / (fed * (fed + 1) / 2) if fed else 0.0


@dataclass(frozen=True)
class Timings:
    """Time of a request by phase."""

    first_token: float
    decode: float


@dataclass(frozen=True)
class EngineOutput:
    """Generated rows, in the order of the prompts; samples of one prompt stand side by side.

    Attributes:
        state: The cache and the raw ids, to continue with another turn.
        merge: What was merged; ``raw_tail`` tokens at the end of each prompt stayed raw.
        span_eviction: Age at which columns of spans left the cache; None where none left.
        dropped: Columns per row that left it: of all layers, or of those below the merge depth.
    """

    rows: tuple[RowOutput, ...]
    timings: Timings = field(compare=False)
    state: GenerationState = field(compare=False, repr=False)
    merge: Merge = field(compare=False)
    raw_tail: int = field(compare=False)
    span_eviction: int | None = field(compare=False)
    dropped: tuple[int, ...] = field(compare=False)


@dataclass(frozen=True)
class Forward:
    """State of a generation after one forward, for observers.

    Attributes:
        logits: Next-token logits [B, V].
        lengths: Units held per row [B] (int64, CPU).
        generated: Generated ids per row so far; all of a running row's ids have been fed.
        running: Whether a row has not ended [B] (bool, CPU).
    """

    logits: Tensor
    lengths: Tensor
    generated: tuple[tuple[int, ...], ...]
    running: Tensor


Observer = Callable[[Forward], None]
