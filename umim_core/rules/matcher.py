"""Longest-first, left-to-right matching of a rule set over token ids.

The rules form a trie in one hash table (see ``trie``). A position costs one look into a bit set
that fits the cache, and a lookup per token of the longest rule where one may begin.

``SuffixMatcher`` merges the end of texts that grow, many rows at once. A row's state is its last
raw tokens, as many as the longest rule has, and which of them begin a unit. With the rule (b, c)
and the tokens a b c::

    added    units before    taken back    new unit    units after
    a        -               0             a           a
    b        a               0             b           a b
    c        a b             1             (b, c)      a (b, c)

The leftmost unit boundary among these from which a rule ends exactly at the new token wins.
Longest-first, left-to-right matching of the whole text would cut the same units: growing a text by
one token changes its segmentation only from the first boundary on whose longest rule now ends
there. What a token costs does not depend on the length of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from umim_core.errors import CorpusError, GenerationError, require
from umim_core.rules.grams import LONGEST
from umim_core.rules.ruleset import RuleSet
from umim_core.rules.trie import Words, advance, segment
from umim_core.text.token_ids import AnyInts, Ints, check_offsets, read_ids


@dataclass(frozen=True)
class Advance:
    """Change of each row [B] by a new token; zeros for rows that got none.

    Attributes:
        rollback: Units to take back first [B] (0 .. longest - 1).
        spans: Raw ids of the one new unit [B, longest]: the token alone, or a rule that ends with
            it; zeros behind its end.
        lengths: Ids of that unit [B] (1 .. longest).
    """

    rollback: Ints
    spans: Ints
    lengths: Ints


class SuffixMatcher:
    """Follow B texts that grow by one token at a time, all of them empty at first."""

    def __init__(self, slots: Words, rows: int, longest: int = LONGEST) -> None:
        self._slots = slots
        self._recent = np.full((rows, longest), -1, dtype=np.int32)
        self._borders = np.zeros(rows, dtype=np.int64)

    def advance(self, tokens: Ints, running: NDArray[np.bool_]) -> Advance:
        """Add one token [B] to every row that is running [B]; those of other rows are ignored."""
        return Advance(*advance(tokens, running, self._recent, self._borders, self._slots))


class Matcher:
    """Segment token ids into units: a matched rule, or a single raw token; there may be no rules.

    Example:
        With the rules (1,2) and (1,2,3), the ids 1 2 3 1 2 4 become the units
        (1,2,3) (1,2) (4): starts 0 3 5, lengths 3 2 1.

    Source: paper, "Non-overlapping Assignment in a Sequence".
    """

    def __init__(self, rules: RuleSet) -> None:
        self.rules = rules
        self._tables = rules.tables

    def segment(self, ids: NDArray[np.integer]) -> tuple[Ints, Ints]:
        """Cut token ids [T] into units, in order: their starts [S] and lengths [S] (int64)."""
        starts, lengths, _ = self.segment_many(ids, np.array([0, len(ids)], dtype=np.int64))
        return starts, lengths

    def segment_many(
        self, ids: NDArray[np.integer], offsets: Ints, *, threads: int = 1
    ) -> tuple[Ints, Ints, Ints]:
        """Cut many sequences at once, flat ids [T] with borders [B + 1] (int64) that none crosses.

        Threads share the sequences; the result is the same.

        Returns:
            Starts [S] (positions in the flat array), lengths [S], and unit borders [B + 1].
        """
        tokens = read_ids(ids, 0, len(ids))
        check_offsets(offsets, len(ids))
        borders = np.array(offsets, dtype=np.int64)
        goals = np.linspace(0, len(tokens), threads + 1)[1:-1]
        cuts = np.unique([0, *np.searchsorted(borders, goals), len(borders) - 1]).tolist()
        if len(cuts) <= 2:
            return self._cut(tokens, borders)
        with ThreadPoolExecutor(len(cuts) - 1) as pool:
            parts = list(pool.map(lambda part: self._part(tokens, borders, *part), pairwise(cuts)))
        starts, lengths, counts = zip(*parts, strict=True)
        unit_borders = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
        return np.concatenate(starts), np.concatenate(lengths), unit_borders.astype(np.int64)

    def _part(
        self, tokens: NDArray[np.int32], borders: Ints, low: int, high: int
    ) -> tuple[Ints, Ints, Ints]:
        """Cut the sequences ``low`` .. ``high``; return starts, lengths and units per sequence."""
        first, last = borders[low], borders[high]
        starts, lengths, unit_borders = self._cut(
            tokens[first:last], borders[low : high + 1] - first
        )
        starts += first
        return starts, lengths, np.diff(unit_borders)

    def _cut(self, tokens: NDArray[np.int32], borders: Ints) -> tuple[Ints, Ints, Ints]:
        result: tuple[Ints, Ints, Ints] = segment(
            tokens, borders, self._tables.slots, self._tables.pairs
        )
        return result

    def token_reduction(self, ids: NDArray[np.integer], offsets: Ints) -> float:
        """Return (raw tokens - units) / raw tokens of a text, ids [T] and segment borders."""
        return token_reduction(len(ids), len(self.segment_many(ids, offsets)[0]))

    def suffixes(self, rows: int) -> SuffixMatcher:
        return SuffixMatcher(self._tables.slots, rows, self.rules.longest)


def token_reduction(tokens: int, units: int) -> float:
    """Return (raw tokens - units) / raw tokens; the source is the paper, "token reduction"."""
    rule = "a text whose token reduction is measured must hold at least one token"
    require(tokens > 0, CorpusError, rule, 0, "Give more text.")
    return (tokens - units) / tokens


Parts = tuple[tuple[int, int], ...]
"""Tokens of a text that may merge, as (first token, end), in order and apart."""


def segment_parts(
    segment: Callable[[NDArray[np.integer]], tuple[Ints, Ints]],
    ids: NDArray[np.integer],
    parts: Sequence[tuple[int, int]] | None = None,
    raw_tail: int = 0,
) -> tuple[Ints, Ints]:
    """Cut ids [T] into units where rules apply to some parts only, each cut on its own.

    ``parts`` are (first token, end), in order and apart, None for one of all tokens; the last
    ``raw_tail`` tokens of each stay raw. ``segment`` cuts as ``Matcher.segment``, and so are starts
    [S] and lengths [S] (int64).
    """
    starts, lengths, at = [], [], 0
    for first, end in (*(((0, len(ids)),) if parts is None else parts), (len(ids), len(ids))):
        raw, at = np.arange(at, first, dtype=np.int64), max(first, end - raw_tail)
        part_starts, part_lengths = segment(ids[first:at])
        starts += [raw, part_starts + first]
        lengths += [np.ones_like(raw), part_lengths]
    return np.concatenate(starts), np.concatenate(lengths)


def check_parts(parts: Sequence[tuple[int, int]], size: int) -> None:
    """Refuse parts of a text of so many tokens that lie beyond it, or not in order and apart."""
    borders = [0, *chain.from_iterable(parts), size]
    rule = f"parts that may merge must lie in the {size} tokens, in order and apart"
    remedy = "Give the first token and the end of each."
    fits = all(first <= end for first, end in pairwise(borders))
    require(fits, GenerationError, rule, parts, remedy)


@dataclass(frozen=True)
class PromptIds:
    """A prompt of raw ids [T] of which only some parts may merge; None for all of it.

    Parts are (first token, end), in order; each is matched on its own, and its last ``raw_tail``
    tokens stay raw. ``unmerged`` says why more stays raw than the template and replies; mostly "".
    """

    ids: AnyInts
    parts: Parts | None = None
    unmerged: str = ""

    def __post_init__(self) -> None:
        check_parts(() if self.parts is None else self.parts, len(self.ids))


def parts_behind(parts: Parts | None, dropped: int) -> Parts | None:
    """Return the parts of a text whose first tokens were dropped; None for all of it."""
    if parts is None:
        return None
    return tuple((max(0, a - dropped), b - dropped) for a, b in parts if b > dropped)
