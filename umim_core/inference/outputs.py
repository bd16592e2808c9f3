"""Rows of a generation, what they were cut into, and what others go on from.

Shapes: B rows, V vocabulary, T raw tokens, S units.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from umim_core.errors import GenerationError, NumericalError, require
from umim_core.inference.choice import StopReason
from umim_core.inference.unit_cache import UnitCache
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.packing import Segmentation
from umim_core.text.token_ids import Ints

if TYPE_CHECKING:
    from umim_core.inference.options import GenerateOptions

Spans = tuple[tuple[int, int], ...]
TopTokens = tuple[tuple[int, float], ...]


def merged_spans(cut: Segmentation) -> Spans:
    starts, lengths = cut
    merged = lengths > 1
    return tuple(zip(starts[merged].tolist(), lengths[merged].tolist(), strict=True))


@dataclass(eq=False)
class Row:
    """One row, while it runs and when it has ended.

    Attributes:
        raw: All raw ids so far: an earlier turn's, the prompt's and the generated ones.
        past: How many an earlier turn left in the cache.
        prompt_length: How many were prefilled: the prompt, behind an earlier turn's last token
            where a state was continued.
        cut: The units they were prefilled as.
        reused: Units among them that were not evaluated, since their columns were kept.
        unit_lengths: Tokens of each unit that was fed behind the prompt.
        dropped: Columns that span eviction has dropped.
        cache_lengths: Units in the cache after the prefill and after each fed token, one per
            generated id. A continued state counts from what it held.
        logprobs: The model's log-probability of each generated id, before any processor; None
            unless asked for.
        top_logprobs: The most probable (id, log-probability) at each step, likewise.
        stop_reason: Why it ended; None while it runs.
        error: Why it failed, if it did.
    """

    raw: list[int]
    past: int
    prompt_length: int
    cut: Segmentation = field(repr=False)
    unit_lengths: list[int] = field(default_factory=list, repr=False)
    reused: int = 0
    dropped: int = 0
    cache_lengths: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    top_logprobs: list[TopTokens] | None = None
    stop_reason: StopReason | None = None
    error: GenerationError | NumericalError | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Row) and self._record == other._record

    @property
    def _record(self) -> tuple[object, ...]:
        units = (self.prompt_units, self.prompt_spans, self.generated_spans, self.cache_lengths)
        return self.ids, self.prompt_ids, units, self.stop_reason, self.logprobs, self.top_logprobs

    @property
    def running(self) -> bool:
        return self.stop_reason is None and self.error is None

    @property
    def generated(self) -> int:
        return len(self.raw) - self.past - self.prompt_length

    @property
    def ids(self) -> tuple[int, ...]:
        """Generated raw ids; an end-of-sequence id that ended the row is included."""
        return tuple(self.raw[self.past + self.prompt_length :])

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return tuple(self.raw[self.past : self.past + self.prompt_length])

    @property
    def prompt_units(self) -> int:
        return len(self.cut[0])

    @property
    def prompt_spans(self) -> Spans:
        """Their merged spans as (start, length) in raw prompt tokens."""
        return merged_spans(self.cut)

    @property
    def generated_spans(self) -> Spans:
        """Merged spans among the generated tokens that were fed (all but the last)."""
        lengths = np.array(self.unit_lengths, dtype=np.int64)
        return merged_spans((np.cumsum(lengths) - lengths, lengths))

    @property
    def token_reduction(self) -> float:
        """(raw tokens - units) / raw tokens of the prompt."""
        return (self.prompt_length - self.prompt_units) / self.prompt_length

    @property
    def gen_kv_reduction(self) -> float:
        """1 - U_T / T: entries saved at the end among the T generated tokens fed; 0 if T = 0.

        Above 1 where span eviction dropped more columns than the tokens added, old spans of the
        prompt included.

        Source: paper, "Generation Quality" (Gen-KV TR).
        """
        fed = self.generated - 1
        return (fed - self.cache_lengths[-1] + self.cache_lengths[0]) / fed if fed > 0 else 0.0

    @property
    def cumulative_kv_reduction(self) -> float:
        """1 - sum U_t / sum t over the T generated tokens fed; 0 if T = 0.

        Source: paper, "Generation Quality" (cumulative KV TR).
        """
        fed = self.generated - 1
        held = sum(self.cache_lengths[1:]) - fed * self.cache_lengths[0]
        return 1.0 - held / (fed * (fed + 1) / 2) if fed > 0 else 0.0

    def held(self) -> tuple[Ints, Ints]:
        """Return the raw ids in the cache [T], and where their units start [S], of a first turn."""
        assert not self.past  # noqa: S101  rows that a store keeps
        lengths = np.array(self.unit_lengths, dtype=np.int64)
        starts = np.cumsum(lengths) - lengths + self.prompt_length
        ids = np.array(self.raw[: self.prompt_length + int(lengths.sum())], dtype=np.int64)
        return ids, np.concatenate([self.cut[0], starts])


@dataclass
class GenerationState:
    """The cache of a request and what stands in it, from which any number of turns go on.

    The last token of a row was chosen but never fed; the next turn feeds it first. A turn copies
    the cache and never writes into it, so several threads may continue a state at once. It holds
    the cache's memory, beside the copy's, until it is released or forgotten.

    Attributes:
        cache: The columns; None once the state was released.
        merged_model: The model that wrote them.
        all_fed: Whether the last tokens were fed, too.
        shared: Whether a turn must copy the cache.
    """

    raw_ids: tuple[tuple[int, ...], ...] = field(repr=False)
    cache: UnitCache | None = field(repr=False)
    merged_model: MergedModel = field(repr=False)
    all_fed: bool = False
    shared: bool = True

    @property
    def fed_ids(self) -> tuple[tuple[int, ...], ...]:
        """Raw ids of each row that the cache holds."""
        return self.raw_ids if self.all_fed else tuple(ids[:-1] for ids in self.raw_ids)

    @property
    def unfed(self) -> list[int] | None:
        return None if self.all_fed else [ids[-1] for ids in self.raw_ids]

    def for_turn(self, prompts: int, merged_model: MergedModel) -> GenerationState:
        """Return the state for a turn of so many prompts by a model, its cache not copied yet.

        One row goes on for all prompts.
        """
        cache, made_by, rows = self.cache, self.merged_model, len(self.raw_ids)
        if cache is None:
            rule = "a state that is continued must have a cache"
            found = "it was released, or spans were evicted from it"
            raise GenerationError(rule, found, "Use the state of another output.")
        backbone = merged_model.backbone
        form = (merged_model.unit_positions, merged_model.merge_depth)
        same = form == (made_by.unit_positions, made_by.merge_depth)
        rule = (
            "a state can be continued by the backbone, unit positions and merge depth that made it"
        )
        found = f"{backbone.name or 'another backbone'}, {form[0]}, depth {form[1]}"
        remedy = "Continue it with the same loaded model."
        require(same and backbone is made_by.backbone, GenerationError, rule, found, remedy)
        fits = prompts > 0 and rows in (1, prompts)
        rule = "a continued state needs one prompt per row"
        remedy = "Pass as many prompts as the output has rows."
        require(fits, GenerationError, rule, f"{prompts} prompts, {rows} rows", remedy)
        ids = self.raw_ids if rows > 1 else self.raw_ids * prompts
        return GenerationState(ids, cache, merged_model, self.all_fed)

    def release(self) -> None:
        """Give the cache's memory up; the state cannot be continued any more."""
        self.cache = None


@dataclass(repr=False)
class Prefix(GenerationState):
    """A text in the cache: ``generate(questions, past=prefix)`` goes on from it, again and again.

    ``spans`` are merged, as (start, length) in its raw tokens.
    """

    spans: Spans = ()

    def __repr__(self) -> str:
        return f"Prefix({len(self.raw_ids[0])} tokens, {self.cache_length} units)"

    @property
    def cache_length(self) -> int:
        return len(self.raw_ids[0]) - sum(length - 1 for _, length in self.spans)

    @property
    def token_reduction(self) -> float:
        """(raw tokens - units) / raw tokens."""
        return 1.0 - self.cache_length / len(self.raw_ids[0])


@dataclass(frozen=True)
class Timings:
    first_token: float
    decode: float


@dataclass(frozen=True)
class Generation:
    """Generated rows, in the order of the prompts; samples of one prompt stand side by side.

    Attributes:
        state: The cache and the raw ids, to continue with another turn.
        options: What was asked for, with everything filled in.
    """

    rows: tuple[Row, ...]
    timings: Timings = field(compare=False)
    state: GenerationState = field(compare=False, repr=False)
    options: GenerateOptions = field(compare=False, repr=False)


@dataclass(frozen=True)
class Forward:
    """State of a generation after one forward, for observers.

    Attributes:
        logits: Next-token logits [B, V].
        lengths: Units held per row [B] (int64, CPU).
        generated: Generated ids per row so far; all of a running row's ids have been fed.
        running: Whether each row has not ended [B].
    """

    logits: Tensor
    lengths: Tensor
    generated: tuple[tuple[int, ...], ...]
    running: tuple[bool, ...]


Observer = Callable[[Forward], None]
