"""Matching at the end of a growing text: rules that the newest token completes, many rows at once.

A row's state is its last four raw tokens and which of them begin a unit. With the rule (b, c) and
the tokens a b c added one after the other::

    added    units before    taken back    new unit    units after
    a        -               0             a           a
    b        a               0             b           a b
    c        a b             1             (b, c)      a (b, c)

The leftmost unit boundary among the last three raw tokens from which a rule ends exactly at the new
token wins. Longest-first, left-to-right matching of the whole text would cut the same units:
growing a text by one token changes its segmentation only from the first boundary on whose longest
rule now ends there. A token costs at most six lookups, however long the text is.

A row can be cut: what follows is a text of its own, which no rule enters from before the cut. With
the rules (a, b) and (b, c), a cut before b leaves a raw, and c completes (b, c).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from umim_core.errors import ConfigError
from umim_core.rules.trie import LONGEST, Ints, Words, advance


@dataclass(frozen=True)
class Advance:
    """Change of each row [B] by a new token; zeros for rows that got none.

    Attributes:
        rollback: Units to take back first [B] (0 .. 3).
        spans: Raw ids of the one new unit [B, 4]: the token alone, or a rule that ends with it;
            zeros behind its end.
        lengths: Ids of that unit [B] (1 .. 4).
    """

    rollback: Ints
    spans: Ints
    lengths: Ints


class SuffixMatcher:
    """Follow B texts that grow by one token at a time, all of them empty at first."""

    def __init__(self, slots: Words, rows: int) -> None:
        self._slots = slots
        self._recent = np.full((rows, LONGEST), -1, dtype=np.int32)
        self._borders = np.zeros(rows, dtype=np.int64)

    def resume(self, row: int, ids: Ints, starts: Ints) -> None:
        """Let a row go on from a text of ids [T] that was segmented as a whole by the same rules.

        Its units start at ``starts`` [S].
        """
        last = ids[-LONGEST:]
        self._recent[row] = -1
        self._recent[row, LONGEST - len(last) :] = last
        places = len(ids) - 1 - starts[-LONGEST:]
        self._borders[row] = sum(1 << int(k) for k in places if k < LONGEST - 1)

    def advance(self, tokens: Ints, running: NDArray[np.bool_]) -> Advance:
        """Add one token [B] to every row that is running [B]; those of other rows are ignored.

        Returns:
            How many units each row takes back and which unit it gets.
        """
        # The compiled loop would write beyond the rows.
        if not tokens.shape == running.shape == self._borders.shape:
            raise ConfigError(
                f"tokens and running must have {self._borders.size} rows",
                f"shapes {tokens.shape} and {running.shape}",
                "Give one token and one flag per row.",
            )
        return Advance(*advance(tokens, running, self._recent, self._borders, self._slots))
