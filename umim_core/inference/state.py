"""State of a finished request, so that another turn need not read the past again."""

from __future__ import annotations

from dataclasses import dataclass, field

from umim_core.backbone.row_cache import RowCache
from umim_core.errors import GenerationError
from umim_core.merging.compressed import Compressed


@dataclass
class GenerationState:
    """The cache of a request and what stands in it; one turn can continue it.

    The last token of a row was chosen but never fed; the next turn feeds it first. A state holds
    its cache's memory until it is continued, released or forgotten. A turn that fails or is
    abandoned gives the state back as it was.

    Attributes:
        raw_ids: Prompt and generated raw ids of each row, the unfed last token included.
    """

    raw_ids: tuple[tuple[int, ...], ...]
    _cache: RowCache | None = field(repr=False)
    _compressed: Compressed = field(repr=False)
    _held: tuple[int, ...] = field(default=(), repr=False)

    @property
    def cache_lengths(self) -> tuple[int, ...]:
        """Units held per row; empty once the state was continued or released."""
        return () if self._cache is None else tuple(self._cache.lengths.tolist())

    def check(self, rows: int, compressed: Compressed) -> None:
        """Refuse a turn that cannot continue the state.

        Args:
            rows: Prompts of that turn.
            compressed: The model of that turn; its rules may be others.

        Raises:
            GenerationError: If the state was continued or released, belongs to another backbone or
                policy, or has another number of rows.
        """
        if self._cache is None:
            raise GenerationError(
                "a state can be continued once",
                "it was continued or released",
                "Use the state of the newest output.",
            )
        backbone, own = compressed.backbone, self._compressed
        if backbone is not own.backbone or compressed.unit_positions != own.unit_positions:
            raise GenerationError(
                "a state can be continued by the backbone and unit positions that made it",
                f"{backbone.name or 'another backbone'}, {compressed.unit_positions}",
                "Continue it with the same loaded model.",
            )
        if rows != len(self.raw_ids):
            raise GenerationError(
                "a continued state needs one prompt per row",
                f"{rows} prompts, {len(self.raw_ids)} rows",
                "Pass as many prompts as the output has rows.",
            )

    def take(self) -> RowCache:
        """Hand the cache over; call ``check`` before."""
        assert self._cache is not None  # noqa: S101  check
        self._held = self.cache_lengths
        cache, self._cache = self._cache, None
        return cache

    def give_back(self, cache: RowCache) -> None:
        """Take the cache of a failed turn back; a turn writes behind what it was given only."""
        cache.restore(self._held)
        self._cache = cache

    def release(self) -> None:
        """Give the cache's memory up; the state cannot be continued any more."""
        self._cache = None
