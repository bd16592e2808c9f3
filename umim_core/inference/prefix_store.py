"""Columns of earlier rows, kept for prompts that begin with the same units.

    kept     [x1] [x2 x3] [x4] [x5] [x6]
    prompt   [x1] [x2 x3] [x4] [x7 x8]         shared: 3 units, 4 tokens; evaluated: 1 unit

A prompt takes over columns only where ids and borders of units are its own, so what it reads never
depends on what is kept. Its last unit is always evaluated: the next token follows from it.

Every beginning of a kept row has a key, a hash over its units::

    [x1] -> k1    [x1] [x2 x3] -> k2 = hash(k1, x2 x3)    ...

A key leads to the row that was used last of those that begin with it. So a look-up takes as many
steps as the prompt has units, whatever is kept. Ids and borders are compared, since
keys may collide.

Shapes: T raw tokens, S units.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from umim_core.inference.unit_cache import UnitCache
from umim_core.text.token_ids import Ints

MOST_ROWS: Final = 4096  # their keys take 100 bytes a unit, beside columns of 500 and more


@dataclass(frozen=True, eq=False)
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
        self._max_bytes = max_bytes
        self._prefixes = OrderedDict[_StoredPrefix, None]()  # in the order of their last use
        self._newest: dict[int, _StoredPrefix] = {}  # by key
        self.bytes = 0

    def find(self, ids: Ints, starts: Ints) -> UnitCache | None:
        """Return the longest beginning of a prompt, ids [T] and unit starts [S], that is kept."""
        like, shared = self._like(ids, starts, _keys(ids, starts))
        units = min(shared, len(starts) - 1)
        if like is None or units < 1:
            return None
        self._use(like)
        return UnitCache.of_rows([(like.cache, 0)], (units, int(starts[units])))

    def put(self, ids: Ints, starts: Ints, place: tuple[UnitCache, int]) -> None:
        """Keep a copy of a row, unless it is too large; what it goes on from is forgotten.

        It holds raw ids [T], with unit starts [S], and lies in a row of a cache (``place``).
        """
        if not self._max_bytes:
            return
        keys = _keys(ids, starts)
        like, shared = self._like(ids, starts, keys)
        if like is not None and shared == len(keys):
            self._use(like)
            return
        copy = UnitCache.of_rows([place])
        if copy.bytes > self._max_bytes:
            return
        if like is not None and shared == len(like.keys):
            self._forget(like)  # no other kept row can be a beginning of this one
        self._use(_StoredPrefix(ids, starts, keys, copy))
        self.bytes += copy.bytes
        while self.bytes > self._max_bytes or len(self._prefixes) > MOST_ROWS:
            self._forget(next(iter(self._prefixes)))

    def clear(self) -> None:
        self._prefixes.clear()
        self._newest.clear()
        self.bytes = 0

    def _like(self, ids: Ints, starts: Ints, keys: list[int]) -> tuple[_StoredPrefix | None, int]:
        """Return the row that shares the longest beginning, and its units."""
        shared = next((n for n, key in enumerate(keys) if key not in self._newest), len(keys))
        if not shared:
            return None, 0
        stored = self._newest[keys[shared - 1]]
        tokens = len(ids) if shared == len(keys) else int(starts[shared])
        same = np.array_equal(ids[:tokens], stored.ids[:tokens])
        same &= np.array_equal(starts[:shared], stored.starts[:shared])
        return (stored, shared) if same else (None, 0)

    def _use(self, stored: _StoredPrefix) -> None:
        """Make a row the one that is forgotten last, to which its keys lead."""
        self._prefixes[stored] = None
        self._prefixes.move_to_end(stored)
        self._newest.update(dict.fromkeys(stored.keys, stored))

    def _forget(self, stored: _StoredPrefix) -> None:
        del self._prefixes[stored]
        self.bytes -= stored.cache.bytes
        for key in stored.keys:
            if self._newest.get(key) is stored:  # else a row used later begins so, too
                del self._newest[key]


def _keys(ids: Ints, starts: Ints) -> list[int]:
    """Return a key per beginning [S]; bytes are hashed with a secret of the process."""
    text, keys, key = ids.astype(np.int64).tobytes(), list[int](), 0
    for start, end in pairwise([*(8 * starts).tolist(), len(text)]):
        key = hash((key, hash(text[start:end])))
        keys.append(key)
    return keys
