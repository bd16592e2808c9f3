"""A row: its prompt, what is generated behind it, and how both were cut into units.

Shapes: B rows, T raw tokens, S units.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from umim_core.errors import GenerationError, NumericalError
from umim_core.inference.stopping import StopReason
from umim_core.merging.packing import Segmentation
from umim_core.rules.matcher import Advance, Matcher, SuffixMatcher
from umim_core.text.token_ids import Ints

_FIRST_CAPACITY: Final = 64
_NO_RULES: Final = np.zeros(1, dtype=np.uint64)
Spans = tuple[tuple[int, int], ...]
TopTokens = tuple[tuple[int, float], ...]


class GeneratedUnits:
    """The units of B rows of generated tokens, empty at first; all raw without a matcher.

    The rules see generated tokens only; the token that ends a row is never fed. What merges is
    decided by ``SuffixMatcher``; here it is noted.
    """

    def __init__(self, matcher: Matcher | None, rows: int) -> None:
        self._suffixes = (
            SuffixMatcher(_NO_RULES, rows) if matcher is None else matcher.suffixes(rows)
        )
        self._rows = np.arange(rows)
        self._counts = np.zeros(rows, dtype=np.int64)
        self._lengths = np.zeros((rows, _FIRST_CAPACITY), dtype=np.int8)

    def push(self, tokens: Ints, running: NDArray[np.bool_]) -> Advance:
        """Add the ids just chosen [B] that will be fed to the model, those of ``running`` rows [B].

        Returns:
            How many units each row rolls back and which span it is fed.
        """
        step = self._suffixes.advance(tokens, running)
        self._counts -= step.rollback
        if int(self._counts.max()) == self._lengths.shape[1]:
            self._lengths = np.concatenate([self._lengths, np.zeros_like(self._lengths)], axis=1)
        self._lengths[self._rows, self._counts] = step.lengths  # 0 behind the end of an ended row
        self._counts += running
        return step

    def lengths(self, row: int) -> Ints:
        """Return the tokens of each unit of a row [S]."""
        return self._lengths[row, : self._counts[row]].astype(np.int64)

    def spans(self, row: int) -> Spans:
        """Return a row's merged units as (start, length) in generated tokens, in order."""
        lengths = self.lengths(row)
        return merged_spans((np.cumsum(lengths) - lengths, lengths))


def merged_spans(cut: Segmentation) -> Spans:
    """Return merged units as (start, length) in raw tokens."""
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
        dropped: Columns that span eviction has dropped.
        stop_reason: Why it ended; None while it runs.
        error: Why it failed, if it did.
    """

    raw: list[int]
    past: int
    prompt_length: int
    cut: Segmentation = field(repr=False)
    reused: int = 0
    dropped: int = 0
    stop_reason: StopReason | None = None
    error: GenerationError | NumericalError | None = None
    _units: GeneratedUnits | None = field(default=None, repr=False)
    _number: int = field(default=0, repr=False)  # in its request, and in _units
    _place: tuple[Any, int] | None = field(default=None, repr=False)  # its cache and row there
    _lengths: list[int] = field(default_factory=list, repr=False)
    _logprobs: list[float] | None = field(default=None, repr=False)
    _top_logprobs: list[TopTokens] = field(default_factory=list, repr=False)

    def __eq__(self, other: object) -> bool:
        """Compare what was read and generated, and how."""
        return isinstance(other, Row) and self._record == other._record

    __hash__ = None  # type: ignore[assignment]  # it grows

    @property
    def _record(self) -> tuple[object, ...]:
        units = (self.prompt_units, self.prompt_spans, self.generated_spans, self.cache_lengths)
        return self.ids, self.prompt_ids, units, self.stop_reason, self.logprobs, self.top_logprobs

    @property
    def running(self) -> bool:
        """Whether it goes on."""
        return self.stop_reason is None and self.error is None

    @property
    def generated(self) -> int:
        """Generated tokens."""
        return len(self.raw) - self.past - self.prompt_length

    @property
    def ids(self) -> tuple[int, ...]:
        """Generated raw ids; an end-of-sequence id that ended the row is included."""
        return tuple(self.raw[self.past + self.prompt_length :])

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Raw ids that were prefilled."""
        return tuple(self.raw[self.past : self.past + self.prompt_length])

    @property
    def prompt_units(self) -> int:
        """Units they were prefilled as."""
        return len(self.cut[0])

    @property
    def prompt_spans(self) -> Spans:
        """Their merged spans as (start, length) in raw prompt tokens."""
        return merged_spans(self.cut)

    @property
    def generated_spans(self) -> Spans:
        """Merged spans among the generated tokens that were fed (all but the last)."""
        return () if self._units is None else self._units.spans(self._number)

    @property
    def cache_lengths(self) -> tuple[int, ...]:
        """Units in the cache after the prefill and after each fed token, one per generated id.

        A continued state counts from what it held.
        """
        return tuple(self._lengths)

    @property
    def logprobs(self) -> tuple[float, ...] | None:
        """The model's log-probability of each generated id, before any processor; if asked for."""
        return None if self._logprobs is None else tuple(self._logprobs)

    @property
    def top_logprobs(self) -> tuple[TopTokens, ...] | None:
        """The most probable (id, log-probability) at each step; None unless asked for."""
        return None if self._logprobs is None else tuple(self._top_logprobs)

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
        return (fed - self._lengths[-1] + self._lengths[0]) / fed if fed else 0.0

    @property
    def cumulative_kv_reduction(self) -> float:
        """1 - sum U_t / sum t over the T generated tokens fed; 0 if T = 0.

        Source: paper, "Generation Quality" (cumulative KV TR).
        """
        fed = self.generated - 1
        held = sum(self._lengths[1:]) - fed * self._lengths[0]
        return 1.0 - held / (fed * (fed + 1) / 2) if fed else 0.0

    def held(self) -> tuple[Ints, Ints]:
        """Return the raw ids in the cache [T], and where their units start [S], of a first turn."""
        assert self._units is not None and not self.past  # noqa: S101  rows that a store keeps
        lengths = self._units.lengths(self._number)
        starts = np.cumsum(lengths) - lengths + self.prompt_length
        ids = np.array(self.raw[: self.prompt_length + int(lengths.sum())], dtype=np.int64)
        return ids, np.concatenate([self.cut[0], starts])
