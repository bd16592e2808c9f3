"""Columns of earlier rows, kept for prompts that begin with the same units.

    kept     [x1] [x2 x3] [x4] [x5] [x6]
    prompt   [x1] [x2 x3] [x4] [x7 x8]         shared: 3 units, 4 tokens; evaluated: 1 unit

A prompt takes over columns only where ids and borders of units are its own, so what it reads never
depends on what is kept. Its last unit is always evaluated: the next token follows from it. A prompt
is compared with every kept row, ten microseconds each.

Shapes: T raw tokens, S units.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import numpy as np

from umim_core.inference.unit_cache import UnitCache
from umim_core.text.token_ids import Ints

MOST_ROWS: Final = 512


@dataclass(frozen=True)
class _StoredPrefix:
    ids: Ints  # [T]
    ends: Ints  # of units [S]
    cache: UnitCache


class PrefixStore:
    """The rows used last, within bounds on the bytes of their columns and on their number.

    For one thread.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._prefixes: OrderedDict[int, _StoredPrefix] = OrderedDict()  # by number; last used last
        self._number = 0
        self.bytes = 0

    def find(self, ids: Ints, starts: Ints) -> UnitCache | None:
        """Return the longest beginning of a prompt, ids [T] and unit starts [S], that is kept."""
        number, shared = self._like(ids, _ends(ids, starts))
        units = min(shared, len(starts) - 1)
        if units < 1:
            return None
        self._prefixes.move_to_end(number)
        kept = self._prefixes[number].cache
        return UnitCache.of_rows([(kept, 0)], (units, int(starts[units])))

    def put(self, ids: Ints, starts: Ints, place: tuple[UnitCache, int]) -> None:
        """Keep a copy of a row, unless it is too large; what it goes on from is forgotten.

        It holds raw ids [T], with unit starts [S], and lies in a row of a cache (``place``).
        """
        if not self._max_bytes:
            return
        ends = _ends(ids, starts)
        like, shared = self._like(ids, ends)
        if shared == len(ends):
            self._prefixes.move_to_end(like)
            return
        copy = UnitCache.of_rows([place])
        if copy.bytes > self._max_bytes:
            return
        if shared and shared == len(self._prefixes[like].ends):
            self._forget(like)  # no other kept row can be a beginning of this one
        self._number += 1
        self._prefixes[self._number] = _StoredPrefix(ids, ends, copy)
        self.bytes += copy.bytes
        while self.bytes > self._max_bytes or len(self._prefixes) > MOST_ROWS:
            self._forget(next(iter(self._prefixes)))

    def clear(self) -> None:
        self._prefixes.clear()
        self.bytes = 0

    def _like(self, ids: Ints, ends: Ints) -> tuple[int, int]:
        """Return the row that shares the longest beginning, and its units; 0 for none."""
        best, most = 0, 0
        for number, stored in self._prefixes.items():
            units = _equal(ends, stored.ends)
            tokens = _equal(ids[: ends[units - 1]], stored.ids) if units else 0
            shared = int(np.searchsorted(ends[:units], tokens, side="right"))
            if shared and shared >= most:
                best, most = number, shared
        return best, most

    def _forget(self, number: int) -> None:
        self.bytes -= self._prefixes.pop(number).cache.bytes


def _ends(ids: Ints, starts: Ints) -> Ints:
    return np.append(starts[1:], len(ids))


def _equal(one: Ints, other: Ints) -> int:
    """Return how many first numbers two arrays share."""
    most = min(len(one), len(other))
    apart = one[:most] != other[:most]
    return int(apart.argmax()) if apart.any() else most
