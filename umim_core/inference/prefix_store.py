"""Columns of earlier rows, kept for prompts that begin with the same units.

    kept     [x1] [x2 x3] [x4] [x5] [x6]
    prompt   [x1] [x2 x3] [x4] [x7 x8]         shared: 3 units, 4 tokens; evaluated: 1 unit

A prompt takes over columns only where ids and borders of units are its own, so what it reads never
depends on what is kept. Its last unit is always evaluated: the next token follows from it.

Shapes: T raw tokens, S units.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from umim_core.errors import ConfigError
from umim_core.inference.unit_cache import UnitCache

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class SharedPrefix:
    """Columns that a prompt need not evaluate."""

    cache: UnitCache
    units: int
    tokens: int


@dataclass(frozen=True)
class _StoredPrefix:
    ids: Ints  # [T]
    starts: Ints  # [S]
    cache: UnitCache


class PrefixStore:
    """The newest rows, within a bound on the bytes of their columns; for one thread."""

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ConfigError("kept columns must take 0 bytes or more", max_bytes, "Give 0.")
        self._max_bytes = max_bytes
        self._prefixes: OrderedDict[int, _StoredPrefix] = OrderedDict()
        self._number = 0
        self.bytes = 0

    def find(self, ids: Ints, starts: Ints) -> SharedPrefix | None:
        """Return the longest beginning of a prompt, ids [T] and unit starts [S], that is kept."""
        best, units = None, 0
        for number, stored in self._prefixes.items():
            shared = min(_shared(ids, starts, stored), len(starts) - 1)
            if shared > units:
                best, units = number, shared
        if best is None:
            return None
        self._prefixes.move_to_end(best)
        tokens, cache = int(starts[units]), self._prefixes[best].cache
        mark = cache.mark()
        cache.cut(units, tokens)
        copy = UnitCache.of_rows([(cache, 0)])
        cache.restore(mark)
        return SharedPrefix(copy, units, tokens)

    def put(self, ids: Ints, starts: Ints, place: tuple[UnitCache, int]) -> None:
        """Keep a copy of a row, unless it is too large; what it goes on from is forgotten.

        It holds raw ids [T], with unit starts [S], and lies in a row of a cache (``place``).
        """
        if not self._max_bytes:
            return
        covered: list[int] = []
        for number, stored in self._prefixes.items():
            if _shared(ids, starts, stored) == len(stored.starts):
                covered.append(number)
            elif len(starts) <= len(stored.starts) and _shared(ids, starts, stored) == len(starts):
                self._prefixes.move_to_end(number)
                return
        copy = UnitCache.of_rows([place])
        if copy.bytes > self._max_bytes:
            return
        for number in covered:
            self._forget(number)
        self._number += 1
        self._prefixes[self._number] = _StoredPrefix(ids, starts, copy)
        self.bytes += copy.bytes
        while self.bytes > self._max_bytes:
            self._forget(next(iter(self._prefixes)))

    def clear(self) -> None:
        """Keep nothing of what came so far."""
        self._prefixes.clear()
        self.bytes = 0

    def _forget(self, number: int) -> None:
        self.bytes -= self._prefixes.pop(number).cache.bytes


def _shared(ids: Ints, starts: Ints, stored: _StoredPrefix) -> int:
    """Return how many leading units of two rows are the same."""
    tokens = _equal(ids, stored.ids)
    ends = np.append(starts[1:], len(ids))
    kept_ends = np.append(stored.starts[1:], len(stored.ids))
    units = _equal(ends, kept_ends)
    return int(np.searchsorted(ends[:units], tokens, side="right"))


def _equal(one: Ints, other: Ints) -> int:
    """Return how many leading entries are equal."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length
