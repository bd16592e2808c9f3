"""How the generated side of every row is cut into units, token by token.

The rules see generated tokens only: the prompt is out of sight, and the end-of-sequence token that
ends a row is never fed. What merges is decided by ``rules.suffix``; here it is written down.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from umim_core.rules.matcher import Matcher
from umim_core.rules.suffix import Advance, SuffixMatcher
from umim_core.rules.trie import Ints

_FIRST_CAPACITY: Final = 64
_NO_RULES: Final = np.zeros(1, dtype=np.uint64)


class GeneratedUnits:
    """The units of B rows of generated tokens, all of them empty at first.

    Args:
        matcher: Its rules decide the merges; None keeps every token.
        rows: B.
    """

    def __init__(self, matcher: Matcher | None, rows: int) -> None:
        self._suffixes = (
            SuffixMatcher(_NO_RULES, rows) if matcher is None else matcher.suffixes(rows)
        )
        self._rows = np.arange(rows)
        self._pushed = 0
        self._counts = np.zeros(rows, dtype=np.int64)
        self._lengths = np.zeros((rows, _FIRST_CAPACITY), dtype=np.int8)

    def push(self, tokens: Ints, running: NDArray[np.bool_]) -> Advance:
        """Add the tokens that will be fed to the model.

        Args:
            tokens: The id just chosen for each row [B]; those of rows that have ended are ignored.
            running: Rows that are fed [B].

        Returns:
            How many units each row rolls back and which span it is fed.
        """
        step = self._suffixes.advance(tokens, running)
        if self._pushed == self._lengths.shape[1]:
            self._lengths = np.concatenate([self._lengths, np.zeros_like(self._lengths)], axis=1)
        self._pushed += 1
        self._counts -= step.rollback
        self._lengths[self._rows, self._counts] = step.lengths  # 0 behind the end of an ended row
        self._counts += running
        return step

    def spans(self, row: int) -> tuple[tuple[int, int], ...]:
        """Return a row's merged units as (start, length) in generated tokens, in order."""
        lengths = self._lengths[row, : self._counts[row]].astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        merged = lengths > 1
        return tuple(zip(starts[merged].tolist(), lengths[merged].tolist(), strict=True))

    def units(self, row: int) -> int:
        """Return how many units a row holds."""
        return int(self._counts[row])
