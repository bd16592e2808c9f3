"""Columns of earlier rows, kept for prompts that begin with the same units.

    kept     [x1] [x2 x3] [x4] [x5] [x6]
    prompt   [x1] [x2 x3] [x4] [x7 x8]         shared: 3 units, 4 tokens; evaluated: 1 unit

A prompt takes over columns only where ids and borders of units are its own, so what it reads never
depends on what is kept. Its last unit is always evaluated: the next token follows from it.

Every beginning of a kept row has a key, a hash over its units::

    [x1] -> k1    [x1] [x2 x3] -> k2 = hash(k1, x2 x3)    ...

A key leads to the row that was used last of those that begin with it. So a look-up takes as many
steps as the prompt has units, whatever is kept. Rows of equal keys are compared, since keys may
collide.

Shapes: T raw tokens, S units.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from umim_core.errors import ConfigError, require
from umim_core.inference.unit_cache import UnitCache
from umim_core.text.token_ids import Ints

MOST_ROWS: Final = 4096  # their keys take 100 bytes a unit, beside columns of 500 and more


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
    keys: list[int]  # [S]
    cache: UnitCache


class PrefixStore:
    """The rows used last, within bounds on the bytes of their columns and on their number.

    For one thread.
    """

    def __init__(self, max_bytes: int) -> None:
        require(
            max_bytes >= 0,
            ConfigError,
            "kept columns must take 0 bytes or more",
            max_bytes,
            "Give 0.",
        )
        self._max_bytes = max_bytes
        self._prefixes: OrderedDict[int, _StoredPrefix] = OrderedDict()  # by number
        self._newest: dict[int, int] = {}  # from a key to a number
        self._number = 0
        self.bytes = 0

    def find(self, ids: Ints, starts: Ints) -> SharedPrefix | None:
        """Return the longest beginning of a prompt, ids [T] and unit starts [S], that is kept."""
        number = self._like(_keys(ids, starts))
        if number is None:
            return None
        stored = self._prefixes[number]
        units = min(_shared(ids, starts, stored), len(starts) - 1)
        if units < 1:
            return None
        self._use(number)
        tokens, cache = int(starts[units]), stored.cache
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
        keys = _keys(ids, starts)
        like = self._like(keys)
        if like is not None and _shared(ids, starts, self._prefixes[like]) == len(starts):
            self._use(like)
            return
        copy = UnitCache.of_rows([place])
        if copy.bytes > self._max_bytes:
            return
        if like is not None:  # no other kept row can be a beginning of this one
            stored = self._prefixes[like]
            if _shared(ids, starts, stored) == len(stored.starts):
                self._forget(like)
        self._number += 1
        self._prefixes[self._number] = _StoredPrefix(ids, starts, keys, copy)
        self._use(self._number)
        self.bytes += copy.bytes
        while self.bytes > self._max_bytes or len(self._prefixes) > MOST_ROWS:
            self._forget(next(iter(self._prefixes)))

    def clear(self) -> None:
        """Keep nothing of what came so far."""
        self._prefixes.clear()
        self._newest.clear()
        self.bytes = 0

    def _like(self, keys: list[int]) -> int | None:
        """Return the row that shares the longest beginning."""
        like = None
        for key in keys:
            number = self._newest.get(key)
            if number is None:
                break
            like = number
        return like

    def _use(self, number: int) -> None:
        """Make a row the one that is forgotten last, to which its keys lead."""
        self._prefixes.move_to_end(number)
        self._newest.update(dict.fromkeys(self._prefixes[number].keys, number))

    def _forget(self, number: int) -> None:
        stored = self._prefixes.pop(number)
        self.bytes -= stored.cache.bytes
        for key in stored.keys:
            if self._newest.get(key) == number:  # else a row used later begins so, too
                del self._newest[key]


def _keys(ids: Ints, starts: Ints) -> list[int]:
    """Return a key per beginning [S]; bytes are hashed with a secret of the process."""
    text = ids.astype(np.int64).tobytes()
    borders = [*(8 * starts).tolist(), len(text)]
    keys, key = [], 0
    for start, end in pairwise(borders):
        key = hash((key, hash(text[start:end])))
        keys.append(key)
    return keys


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
