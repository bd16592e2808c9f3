"""Units of the generated side of every row, cut token by token.

The rules see generated tokens only, unless the border to the prompt is opened; the token that ends
a row is never fed. What merges is decided by ``rules.suffix``; here it is written down::

    rule (p2, g1)   prompt p1 p2, border open, then g1 g2 are fed

    column    0   1   2    3   4          _REACH = 3 columns in front for the prompt's last units
    before    -   p1  p2                  lowest 3, count 3
    g1 fed    -   p1  p2g1                p2 is taken back: lowest 2; the span starts at -1
    g2 fed    -   p1  p2g1 g2
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from umim_core.merging.packing import Segmentation
from umim_core.rules.matcher import Matcher
from umim_core.rules.suffix import Advance, SuffixMatcher
from umim_core.rules.trie import LONGEST, Ints

_FIRST_CAPACITY: Final = 64
_REACH: Final = LONGEST - 1  # units of the prompt that a rule may take back
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
        self._fed = np.zeros(rows, dtype=np.int64)
        self._width = _REACH
        # The last units of the prompt stand in front, of length 0 where rules must not reach them.
        self._counts = np.full(rows, _REACH, dtype=np.int64)
        self._lowest = self._counts.copy()
        self._lengths = np.zeros((rows, _FIRST_CAPACITY), dtype=np.int8)

    def open_border(self, prompts: Sequence[tuple[Ints, Segmentation]]) -> None:
        """Let rules reach from the generated tokens back into the prompts; call it before ``push``.

        Args:
            prompts: Raw ids [T_b] and their units, per row.
        """
        for row, (ids, (starts, lengths)) in enumerate(prompts):
            self._suffixes.resume(row, ids, starts)
            last = lengths[-_REACH:]
            self._lengths[row, _REACH - len(last) : _REACH] = last

    def push(self, tokens: Ints, running: NDArray[np.bool_]) -> Advance:
        """Add the tokens that will be fed to the model.

        Args:
            tokens: The id just chosen for each row [B]; those of rows that have ended are ignored.
            running: Rows that are fed [B].

        Returns:
            How many units each row rolls back and which span it is fed.
        """
        step = self._suffixes.advance(tokens, running)
        if self._width == self._lengths.shape[1]:
            self._lengths = np.concatenate([self._lengths, np.zeros_like(self._lengths)], axis=1)
        self._width += 1
        self._counts -= step.rollback
        np.minimum(self._lowest, self._counts, out=self._lowest)
        self._lengths[self._rows, self._counts] = step.lengths  # 0 behind the end of an ended row
        self._counts += running
        self._fed += running
        return step

    def spans(self, row: int) -> tuple[tuple[int, int], ...]:
        """Return a row's merged units as (start, length) in generated tokens, in order.

        With an open border the first may start at -1 to -3, in the prompt.
        """
        lengths = self._lengths[row, self._lowest[row] : self._counts[row]].astype(np.int64)
        starts = np.cumsum(lengths) - lengths + (self._fed[row] - lengths.sum())
        merged = lengths > 1
        return tuple(zip(starts[merged].tolist(), lengths[merged].tolist(), strict=True))

    def taken_from_prompt(self, row: int) -> int:
        """Return how many units of its prompt a row took back."""
        return _REACH - int(self._lowest[row])
