"""Fixed pairs: the rules of a controlled token reduction of 50 %, in prompt and decode."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

Ints = NDArray[np.int64]


class FixedPairs(Matcher):
    """Cut every two raw tokens into one unit, for a controlled token reduction of 50 %.

    Example:
        The ids 7 8 9 become the units (7,8) (9): starts 0 2, lengths 2 1.
    """

    def __init__(self) -> None:
        super().__init__(RuleSet.from_spans([]))

    def segment(self, ids: NDArray[np.integer]) -> tuple[Ints, Ints]:
        """Return starts [S] and lengths [S] of the pairs; an odd last token stays raw."""
        starts = np.arange(0, len(ids), 2, dtype=np.int64)
        return starts, np.minimum(2, len(ids) - starts)

    def segment_many(self, ids: NDArray[np.integer], offsets: Ints) -> tuple[Ints, Ints, Ints]:
        """Cut many sequences; no pair crosses a border."""
        sizes = np.diff(offsets)
        parts = [self.segment(ids[a:b]) for a, b in pairwise(offsets.tolist())]
        empty = np.zeros(0, dtype=np.int64)
        starts = [part + first for (part, _), first in zip(parts, offsets[:-1], strict=True)]
        lengths = [part for _, part in parts]
        borders = np.concatenate([[0], np.cumsum((sizes + 1) // 2)]).astype(np.int64)
        return np.concatenate([empty, *starts]), np.concatenate([empty, *lengths]), borders

    def contains(self, span: Sequence[int]) -> bool:
        """Return whether the span is a pair."""
        return len(span) == 2
