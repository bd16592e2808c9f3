"""Longest-first matching by other means: a loop over Python sets, and an Aho-Corasick automaton."""

from __future__ import annotations

from typing import Final

import ahocorasick
import numpy as np
from numpy.typing import NDArray

from umim_core.rules.grams import ORDERS
from umim_core.rules.ruleset import RuleSet

Spans = list[tuple[int, int]]  # (start in the flat ids, length) of every merged span, in order
_FIRST_CHARACTER: Final = 1 << 16  # above the surrogates; ids end below 2^18


class SetLoop:
    """Look up tuples in sets, the longest first: the oracle of the other sides.

    A set of the pairs that begin a rule lets most positions pass with one lookup, which makes the
    loop up to half faster.
    """

    def __init__(self, rules: RuleSet) -> None:
        self._rules = {n: set(map(tuple, rules.ids_by_order[n].tolist())) for n in ORDERS}
        self._pairs = {rule[:2] for found in self._rules.values() for rule in found}

    def __call__(self, segments: NDArray[np.integer]) -> Spans:
        """Return the merged spans of segments [S, L]."""
        two, three, four = (self._rules[n] for n in ORDERS)
        pairs, spans = self._pairs, []
        for row, segment in enumerate(segments):
            ids, first, at, end = segment.tolist(), row * len(segment), 0, len(segment) - 1
            while at < end:
                if (ids[at], ids[at + 1]) not in pairs:
                    at += 1
                    continue
                if tuple(ids[at : at + 4]) in four:
                    length = 4
                elif tuple(ids[at : at + 3]) in three:
                    length = 3
                elif tuple(ids[at : at + 2]) in two:
                    length = 2
                else:
                    at += 1
                    continue
                spans.append((first + at, length))
                at += length
        return spans


class AhoCorasick:
    """Ids as characters of a string; the library's own search for leftmost longest matches."""

    def __init__(self, rules: RuleSet) -> None:
        self._automaton = ahocorasick.Automaton(ahocorasick.STORE_INTS)
        for n in ORDERS:
            text = _text(rules.ids_by_order[n])
            for low in range(0, len(text), n):
                self._automaton.add_word(text[low : low + n], n)
        self._automaton.make_automaton()

    def __call__(self, segments: NDArray[np.integer]) -> Spans:
        """Return the merged spans of segments [S, L]."""
        spans: Spans = []
        if not len(self._automaton):
            return spans
        for row, segment in enumerate(segments):
            first = row * len(segment) + 1
            found = self._automaton.iter_long(_text(segment))
            spans += [(first + end - length, length) for end, length in found]
        return spans


def _text(ids: NDArray[np.integer]) -> str:
    characters = ids.astype("<u4") + np.uint32(_FIRST_CHARACTER)
    return characters.tobytes().decode("utf-32-le")


def merged_spans(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Spans:
    """Return the merged spans among the units of our matcher."""
    merged = lengths > 1
    return list(zip(starts[merged].tolist(), lengths[merged].tolist(), strict=True))
