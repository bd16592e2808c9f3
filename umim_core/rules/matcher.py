"""Longest-first, left-to-right matching of a rule set over token ids.

The rules form a trie. The first level is a table over tokens; the deeper ones share a single
open-addressing hash table whose key is (node << 18 | token). A position costs at most four probes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numba
import numpy as np
from numpy.typing import NDArray

from umim_core.rules.counting import MAX_TOKEN_ID, ORDERS, TOKEN_BITS, check_ids, check_offsets
from umim_core.rules.ruleset import RuleSet

Ints = NDArray[np.int64]
_LOAD: Final = 0.5
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio (Fibonacci hashing)
_EMPTY: Final = np.int64(-1)
_njit = numba.njit(cache=True)


@_njit
def _slot(key: np.int64, shift: np.uint64) -> np.int64:
    return np.int64((np.uint64(key) * _MIX) >> shift)


@_njit
def _child(
    keys: Ints, children: NDArray[np.int32], shift: np.uint64, node: int, token: int
) -> np.int32:
    key = (np.int64(node) << TOKEN_BITS) | np.int64(token)
    slot = _slot(key, shift)
    while keys[slot] != _EMPTY:
        if keys[slot] == key:
            child: np.int32 = children[slot]
            return child
        slot = (slot + 1) % keys.size
    return np.int32(-1)


@_njit
def _insert(
    ids: NDArray[np.int32],
    first: NDArray[np.int32],
    keys: Ints,
    children: NDArray[np.int32],
    terminal: NDArray[np.bool_],
    shift: np.uint64,
    used: int,
) -> int:
    for row in range(ids.shape[0]):
        node = first[ids[row, 0]]
        if node < 0:
            node = np.int32(used)
            first[ids[row, 0]] = node
            used += 1
        for column in range(1, ids.shape[1]):
            token = ids[row, column]
            child = _child(keys, children, shift, node, token)
            if child < 0:
                key = (np.int64(node) << TOKEN_BITS) | np.int64(token)
                slot = _slot(key, shift)
                while keys[slot] != _EMPTY:
                    slot = (slot + 1) % keys.size
                keys[slot] = key
                child = np.int32(used)
                children[slot] = child
                used += 1
            node = child
        terminal[node] = True
    return used


@_njit
def _longest(
    ids: Ints,
    position: int,
    end: int,
    first: NDArray[np.int32],
    keys: Ints,
    children: NDArray[np.int32],
    terminal: NDArray[np.bool_],
    shift: np.uint64,
) -> int:
    """Return the length of the longest rule at ``position`` that ends by ``end``, or 1."""
    best = 1
    if ids[position] >= first.size:
        return best
    node = first[ids[position]]
    length = 1
    while node >= 0:
        if terminal[node]:
            best = length
        if position + length >= end:
            break
        node = _child(keys, children, shift, node, ids[position + length])
        length += 1
    return best


@_njit
def _segment(
    ids: Ints,
    offsets: Ints,
    first: NDArray[np.int32],
    keys: Ints,
    children: NDArray[np.int32],
    terminal: NDArray[np.bool_],
    shift: np.uint64,
) -> tuple[Ints, Ints, Ints]:
    starts = np.empty(ids.size, dtype=np.int64)
    lengths = np.empty(ids.size, dtype=np.int64)
    unit_offsets = np.zeros(offsets.size, dtype=np.int64)
    units = 0
    for row in range(offsets.size - 1):
        position = offsets[row]
        while position < offsets[row + 1]:
            step = _longest(ids, position, offsets[row + 1], first, keys, children, terminal, shift)
            starts[units] = position
            lengths[units] = step
            units += 1
            position += step
        unit_offsets[row + 1] = units
    return starts[:units], lengths[:units], unit_offsets


class Matcher:
    """Segment token ids into units: a matched rule, or a single raw token.

    Args:
        rules: The rule set; it may be empty.

    Example:
        With the rules (1,2) and (1,2,3), the ids 1 2 3 1 2 4 become the units
        (1,2,3) (1,2) (4): starts 0 3 5, lengths 3 2 1.

    Source: paper, "Non-overlapping Assignment in a Sequence".
    """

    def __init__(self, rules: RuleSet) -> None:
        self.rules = rules
        top = max((int(ids.max()) for ids in rules.ids_by_order.values() if len(ids)), default=0)
        edges = sum((n - 1) * rules.counts_by_order[n] for n in ORDERS)
        bits = max(4, int(np.ceil(np.log2(max(1, edges) / _LOAD))))
        self._first = np.full(top + 1, -1, dtype=np.int32)
        self._keys = np.full(1 << bits, _EMPTY, dtype=np.int64)
        self._children = np.full(1 << bits, -1, dtype=np.int32)
        self._terminal = np.zeros(edges + top + 2, dtype=np.bool_)
        self._shift = np.uint64(64 - bits)
        used = 0
        for n in ORDERS:
            used = _insert(
                rules.ids_by_order[n],
                self._first,
                self._keys,
                self._children,
                self._terminal,
                self._shift,
                used,
            )

    def segment(self, ids: NDArray[np.integer]) -> tuple[Ints, Ints]:
        """Cut one sequence into units.

        Args:
            ids: Token ids [T].

        Returns:
            Starts [S] and lengths [S] (int64); they cover every token once, in order.

        Raises:
            CorpusError: If the ids are not 1-D or out of range.
        """
        starts, lengths, _ = self.segment_many(ids, np.array([0, len(ids)], dtype=np.int64))
        return starts, lengths

    def segment_prefix(self, ids: NDArray[np.integer], mergeable: int) -> tuple[Ints, Ints]:
        """Cut one sequence into units where rules apply to its first ``mergeable`` tokens only.

        Args:
            ids: Token ids [T].
            mergeable: Leading tokens open to merging, 0 .. T; the others stay raw.

        Returns:
            Starts [S] and lengths [S] (int64), as :meth:`segment`.
        """
        starts, lengths = self.segment(ids[:mergeable])
        raw = np.arange(mergeable, len(ids), dtype=np.int64)
        return np.concatenate([starts, raw]), np.concatenate([lengths, np.ones_like(raw)])

    def segment_many(self, ids: NDArray[np.integer], offsets: Ints) -> tuple[Ints, Ints, Ints]:
        """Cut many sequences at once; no unit crosses a border.

        Args:
            ids: Token ids of all sequences, flat [T].
            offsets: Borders [B + 1] (int64), first 0, last T, never falling.

        Returns:
            Starts [S] (positions in the flat array), lengths [S], and unit borders [B + 1].

        Raises:
            CorpusError: If the ids are out of range or the borders do not cover them.
        """
        result: tuple[Ints, Ints, Ints] = _segment(
            check_ids(ids),
            check_offsets(offsets, len(ids)),
            self._first,
            self._keys,
            self._children,
            self._terminal,
            self._shift,
        )
        return result

    def contains(self, span: Sequence[int]) -> bool:
        """Return whether these 2 to 4 ids are exactly one rule."""
        if not 2 <= len(span) <= ORDERS[-1] or not 0 <= min(span) <= max(span) <= MAX_TOKEN_ID:
            return False
        ids = np.array(span, dtype=np.int64)
        if ids[0] >= self._first.size:
            return False
        node = int(self._first[ids[0]])
        for token in ids[1:]:
            if node < 0:
                return False
            node = int(_child(self._keys, self._children, self._shift, node, token))
        return node >= 0 and bool(self._terminal[node])
