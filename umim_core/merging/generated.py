"""The units of one row's generated side, and the rule that merges the token just chosen.

With the rule (b, c) and the tokens a b c chosen one after the other::

    chosen   units held before    rolled back    unit fed     units held after
    a        -                    0              a            a
    b        a                    0              b            a b
    c        a b                  1              z(b, c)      a z

The leftmost unit boundary from which a rule ends exactly at the new token wins. Longest-first,
left-to-right matching of the generated ids alone would cut the same units: growing a text by one
token changes its segmentation only from the first boundary on whose longest rule now ends there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from umim_core.rules.counting import ORDERS
from umim_core.rules.matcher import Matcher

_REACH: Final = ORDERS[-1]  # tokens of the longest rule


@dataclass(frozen=True)
class Step:
    """What to do with the token just chosen.

    Attributes:
        rollback: Units to take out of the cache first (0 .. 3).
        span: Raw ids of the one unit to feed: the token alone, or a rule that ends with it.
    """

    rollback: int
    span: tuple[int, ...]


@dataclass
class GeneratedUnits:
    """Generated raw ids and how they are cut into units; the prompt is out of sight.

    Args:
        matcher: Its rules decide the merges; None keeps every token.
    """

    matcher: Matcher | None
    _ids: list[int] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)  # first position of each unit

    def push(self, token: int) -> Step:
        """Add a token that will be fed to the model.

        Args:
            token: The id just chosen; an end-of-sequence token is never pushed.

        Returns:
            How many units to roll back and which span to feed.
        """
        self._ids.append(token)
        end = len(self._ids)
        # Candidate boundaries are the starts of the last three units that lie within reach.
        candidates = [start for start in self._starts[1 - _REACH :] if end - start <= _REACH]
        for back, start in zip(range(len(candidates), 0, -1), candidates, strict=True):
            span = tuple(self._ids[start:])
            if self.matcher is not None and self.matcher.contains(span):
                del self._starts[-back:]
                self._starts.append(start)
                return Step(back, span)
        self._starts.append(end - 1)
        return Step(0, (token,))

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Merged units as (start, length) in generated tokens, in order."""
        borders = [*self._starts, len(self._ids)]
        return tuple((start, end - start) for start, end in pairwise(borders) if end - start > 1)

    @property
    def units(self) -> int:
        """Number of units held."""
        return len(self._starts)
