"""Fixed pairs: rules of a controlled token reduction, in prompt and decode.

A token reduction of 50 % makes one unit of every two tokens, a smaller one of a share of these
pairs, evenly spread::

    ids              1 2 3 4 5 6 7 8 9
    reduction 50 %   (1 2) (3 4) (5 6) (7 8) 9
    reduction 25 %   1 2 (3 4) 5 6 (7 8) 9
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from umim_core.errors import ConfigError
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.rules.suffix import Advance, SuffixMatcher
from umim_core.rules.trie import LONGEST

Ints = NDArray[np.int64]
_ROUNDING: Final = 1e-9  # so that ten tenths are one


def _merged(pairs: Ints, share: float) -> NDArray[np.bool_]:
    """Return which pairs [K] (0, 1, ...) are merged if a share of them is."""
    before, after = (np.floor(n * share + _ROUNDING) for n in (pairs, pairs + 1))
    return np.asarray(after > before)


class PairSuffixes(SuffixMatcher):
    """Follow rows whose pairs of tokens become units."""

    def __init__(self, rows: int, share: float) -> None:
        super().__init__(np.zeros(1, dtype=np.uint64), rows)
        self._share = share
        self._single = np.full(rows, -1, dtype=np.int64)  # an id that waits for its partner
        self._pairs = np.zeros(rows, dtype=np.int64)  # complete ones so far

    def resume(self, row: int, ids: Ints, starts: Ints) -> None:
        """Go on behind a text; its last token waits for a partner where their number is odd."""
        self._single[row] = ids[-1] if len(ids) % 2 else -1
        self._pairs[row] = len(ids) // 2

    def advance(self, tokens: Ints, running: NDArray[np.bool_]) -> Advance:
        """Pair each running row's token with the one before, unless that is in a pair already."""
        complete = running & (self._single >= 0)
        merged = complete & _merged(self._pairs, self._share)
        spans = np.zeros((len(tokens), LONGEST), dtype=np.int64)
        spans[running, 0] = tokens[running]
        spans[merged, 0], spans[merged, 1] = self._single[merged], tokens[merged]
        self._single = np.where(complete, -1, np.where(running, tokens, self._single))
        self._pairs += complete
        return Advance(merged.astype(np.int64), spans, running.astype(np.int64) + merged)


class FixedPairs(Matcher):
    """Cut a text into pairs of raw tokens, for a controlled token reduction.

    Args:
        token_reduction: Half the share of pairs that become one unit; above 0, at most 0.5.

    Raises:
        ConfigError: If it is out of range.

    Example:
        The ids 7 8 9 become the units (7,8) (9): starts 0 2, lengths 2 1.
    """

    def __init__(self, token_reduction: float = 0.5) -> None:
        if not 0.0 < token_reduction <= 0.5:
            raise ConfigError(
                "pairs give a token reduction above 0 and at most 0.5",
                token_reduction,
                "Choose one between.",
            )
        super().__init__(RuleSet.from_spans([]))
        self._share = 2.0 * token_reduction

    def segment(self, ids: NDArray[np.integer]) -> tuple[Ints, Ints]:
        """Return starts [S] and lengths [S] of the units; an odd last token stays raw."""
        second = np.zeros(len(ids), dtype=bool)  # tokens behind the first of a unit
        count = len(ids) // 2
        second[1 : 2 * count : 2] = _merged(np.arange(count), self._share)
        starts = np.flatnonzero(~second).astype(np.int64)
        return starts, np.diff(starts, append=len(ids))

    def segment_many(
        self, ids: NDArray[np.integer], offsets: Ints, *, threads: int = 1
    ) -> tuple[Ints, Ints, Ints]:
        """Cut many sequences in this thread; no pair crosses a border."""
        parts = [self.segment(ids[a:b]) for a, b in pairwise(offsets.tolist())]
        empty = np.zeros(0, dtype=np.int64)
        starts = [part + first for (part, _), first in zip(parts, offsets[:-1], strict=True)]
        lengths = [part for _, part in parts]
        borders = np.cumsum([0, *(len(part) for part in lengths)]).astype(np.int64)
        return np.concatenate([empty, *starts]), np.concatenate([empty, *lengths]), borders

    def contains(self, span: Sequence[int]) -> bool:
        """Return whether the span is a pair."""
        return len(span) == 2

    def suffixes(self, rows: int) -> PairSuffixes:
        """Return what merges generated tokens with the ones before them."""
        return PairSuffixes(rows, self._share)
