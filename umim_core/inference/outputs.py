"""Rows of a generation, and the state and prefixes that others go on from.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from umim_core.errors import GenerationError, require
from umim_core.inference.rows import Row, Spans
from umim_core.inference.unit_cache import CacheMark, UnitCache
from umim_core.merging.merged_model import MergedModel

if TYPE_CHECKING:
    from umim_core.inference.options import GenerateOptions


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
    _taken: tuple[UnitCache, CacheMark] | None = field(default=None, repr=False)
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
        require(
            self._cache is not None,
            GenerationError,
            "a state can be continued once",
            "it was continued or released, or spans were evicted from it",
            "Use the state of the newest output.",
        )
        backbone, own = merged_model.backbone, self._merged_model
        form = (merged_model.unit_positions, merged_model.merge_depth)
        require(
            backbone is own.backbone and form == (own.unit_positions, own.merge_depth),
            GenerationError,
            "a state can be continued by the backbone, unit positions and merge depth that made it",
            f"{backbone.name or 'another backbone'}, {form[0]}, depth {form[1]}",
            "Continue it with the same loaded model.",
        )
        require(
            rows == len(self.raw_ids),
            GenerationError,
            "a continued state needs one prompt per row",
            f"{rows} prompts, {len(self.raw_ids)} rows",
            "Pass as many prompts as the output has rows.",
        )

    def take(self) -> UnitCache:
        """Hand the cache over; call ``check`` before, and ``release`` or ``give_back`` behind."""
        assert self._cache is not None  # noqa: S101  check
        cache, self._cache = self._cache, None
        self._taken = cache, cache.mark()
        return cache

    def give_back(self) -> None:
        """Take the cache of a failed turn back; a turn writes behind what it was given only."""
        if self._taken is not None:
            self._cache, mark = self._taken
            self._cache.restore(mark)
            self._taken = None

    def release(self) -> None:
        """Give the cache's memory up; the state cannot be continued any more."""
        self._cache = self._taken = None


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


@dataclass(frozen=True)
class Timings:
    """Seconds of a request by phase."""

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
