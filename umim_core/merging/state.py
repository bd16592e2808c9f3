"""What a finished request leaves behind, so that another turn need not read the past again."""

from __future__ import annotations

from dataclasses import dataclass, field

from umim_core.errors import GenerationError
from umim_core.merging.cache import RowCache


@dataclass
class GenerationState:
    """The cache of a request and what stands in it; it can be continued once.

    The last token of a row was chosen but never fed; the next turn feeds it first.

    Attributes:
        raw_ids: Prompt and generated raw ids of each row, the unfed last token included.
    """

    raw_ids: tuple[tuple[int, ...], ...]
    _cache: RowCache = field(repr=False)
    _taken: bool = field(default=False, repr=False)

    @property
    def cache_lengths(self) -> tuple[int, ...]:
        """Units held per row."""
        return tuple(self._cache.lengths.tolist())

    def check(self, rows: int) -> None:
        """Refuse a turn that cannot continue the state.

        Args:
            rows: Prompts of that turn.

        Raises:
            GenerationError: If it was continued before, or has another number of rows.
        """
        if self._taken:
            raise GenerationError(
                "a state can be continued once",
                "it was continued before",
                "Use the state of the newest output.",
            )
        if rows != len(self.raw_ids):
            raise GenerationError(
                "a continued state needs one prompt per row",
                f"{rows} prompts, {len(self.raw_ids)} rows",
                "Pass as many prompts as the output has rows.",
            )

    def take(self) -> RowCache:
        """Hand the cache to the turn that continues it; there can be no other."""
        self._taken = True
        return self._cache
