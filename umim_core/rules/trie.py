"""Compiled loops over the rule trie: build, check, segment, and follow the end of a text.

The trie is one open-addressing hash table of 8-byte words; a node is the slot that it lies in, so
no child is stored. All loops that know the layout are in this file::

    word    parent << 20 | token << 2 | continues << 1 | rule        0 where empty
    parent  the first token of a 2-gram, else 2^18 + slot of the node above

With the rules (1,2) and (1,2,3), if (1,2) lies in slot 7::

    slot 7      1 << 20          | 2 << 2 | 1 << 1 | 1
    elsewhere   (2^18 + 7) << 20 | 3 << 2 |          1

Whatever the words hold, no loop leaves the arrays: slots are computed, never read, and a walk is at
most four tokens long. One empty slot ends every search. A bit set next to the trie holds the pairs
that begin a rule: it fits the cache, and most positions of a text end there.
"""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from umim_core.rules.grams import ORDERS
from umim_core.text.token_ids import MAX_TOKEN_ID, TOKEN_BITS

Ids = NDArray[np.int32]
Ints = NDArray[np.int64]
Words = NDArray[np.uint64]

LONGEST: Final = ORDERS[-1]
_FIRST_NODE: Final = 1 << TOKEN_BITS  # parents below are tokens
_RULE: Final = np.uint64(1)
_CONTINUES: Final = np.uint64(2)
_FLAGS: Final = np.uint64(2)  # bits of the two flags
_EMPTY: Final = np.uint64(0)  # a node has a flag, so no word of a node is 0
_HALF: Final = np.uint64(32)
_LOW_HALF: Final = np.uint64((1 << 32) - 1)
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio
_MIX_AGAIN: Final = np.uint64(0xD6E8FEB86659FD93)
_ONE: Final = np.uint64(1)
_WORD: Final = np.uint64(6)  # 2^6 bits in a word
_BIT: Final = np.uint64(63)
_AHEAD: Final = 16  # positions between fetching a slot and reading it
_RING: Final = 2 * _AHEAD - 1  # mask of a ring of positions; longer than _AHEAD
_SPARE: Final = 16  # slots that a search may look at in vain, on average; it is below one
_njit = numba.njit(cache=True, nogil=True)


_cgutils: Any = cgutils  # without types, like all of numba


def _fetch(context: Any, array: Any, index: Any) -> Any:
    """Fetch the cache line of ``array[index]`` without waiting for it."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        item = context.make_array(kind)(context, builder, arguments[0])
        pointer = _cgutils.get_item_pointer(
            context, builder, kind, item, [arguments[1]], wraparound=False
        )
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = _cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [byte, word, word, word]),
            "llvm.prefetch.p0",
        )
        for_reading, keep_in_all_levels, data = word(0), word(3), word(1)
        builder.call(
            function, [builder.bitcast(pointer, byte), for_reading, keep_in_all_levels, data]
        )
        return context.get_dummy_value()

    return types.void(array, index), codegen


prefetch: Final[Any] = intrinsic(_fetch)


@_njit
def _key(parent: int, token: int) -> np.uint64:
    return np.uint64((np.int64(parent) << TOKEN_BITS) | np.int64(token))


@_njit
def _hash(key: np.uint64) -> np.uint64:
    mixed = key * _MIX
    hashed: np.uint64 = (mixed ^ (mixed >> _HALF)) * _MIX_AGAIN
    return hashed


@_njit
def _home(hashed: np.uint64, slots: Words) -> int:
    """Return the slot where a search begins: the upper half of the hash, scaled to the table."""
    return int(np.int64(((hashed >> _HALF) * np.uint64(slots.size)) >> _HALF))


@_njit
def _pair_bit(hashed: np.uint64, pairs: Words) -> np.uint64:
    """Return the bit of a pair: the lower half of the hash, scaled to the bit set."""
    bit: np.uint64 = ((hashed & _LOW_HALF) * (np.uint64(pairs.size) << _WORD)) >> _HALF
    return bit


@_njit
def _has_pair(hashed: np.uint64, pairs: Words) -> bool:
    bit = _pair_bit(hashed, pairs)
    return bool((pairs[np.int64(bit >> _WORD)] >> (bit & _BIT)) & _ONE != _EMPTY)


@_njit
def _find(key: np.uint64, hashed: np.uint64, slots: Words) -> int:
    """Return the slot of a key, or the empty slot where it would lie."""
    slot = _home(hashed, slots)
    while slots[slot] != _EMPTY and slots[slot] >> _FLAGS != key:
        slot += 1
        if slot == slots.size:
            slot = 0
    return slot


@_njit
def union(left: Ints, right: Ints) -> Ints:
    """Return the values of two sorted arrays, each of them once and sorted."""
    both = np.empty(left.size + right.size, dtype=np.int64)
    used, i, j = 0, 0, 0
    while i < left.size or j < right.size:
        if j == right.size or (i < left.size and left[i] <= right[j]):
            value = left[i]
            i += 1
        else:
            value = right[j]
            j += 1
        if not used or both[used - 1] != value:
            both[used] = value
            used += 1
    return both[:used]


@_njit
def insert(ids: Ids, slots: Words, pairs: Words) -> None:
    """Add the rules ``ids`` [R, n] to the trie; ``slots`` must have room for them and one more."""
    for row in range(ids.shape[0]):
        parent = int(ids[row, 0])
        for column in range(1, ids.shape[1]):
            key = _key(parent, ids[row, column])
            hashed = _hash(key)
            if column == 1:
                bit = _pair_bit(hashed, pairs)
                pairs[np.int64(bit >> _WORD)] |= _ONE << (bit & _BIT)
            slot = _find(key, hashed, slots)
            flag = _RULE if column + 1 == ids.shape[1] else _CONTINUES
            slots[slot] |= (key << _FLAGS) | flag
            parent = _FIRST_NODE + slot


@_njit
def mark(ids: Ids, slots: Words, flags: NDArray[np.uint8], bits: Words) -> bool:
    """Look the rules ``ids`` [R, n] up: mark their nodes in ``flags`` [S], their pairs in ``bits``.

    Returns:
        Whether all of them are there, and are found as fast as in a table that ``insert`` filled.
    """
    spare = _SPARE * (ids.size + _SPARE)
    for row in range(ids.shape[0]):
        parent = int(ids[row, 0])
        for column in range(1, ids.shape[1]):
            key = _key(parent, ids[row, column])
            hashed = _hash(key)
            if column == 1:
                bit = _pair_bit(hashed, bits)
                bits[np.int64(bit >> _WORD)] |= _ONE << (bit & _BIT)
            slot = _home(hashed, slots)
            while slots[slot] >> _FLAGS != key:
                spare -= 1
                if slots[slot] == _EMPTY or spare < 0:
                    return False
                slot += 1
                if slot == slots.size:
                    slot = 0
            flags[slot] |= np.uint8(_RULE if column + 1 == ids.shape[1] else _CONTINUES)
            parent = _FIRST_NODE + slot
    return True


@_njit
def holds_only(slots: Words, flags: NDArray[np.uint8]) -> bool:
    """Return whether every node has the flags [S] of the rules that pass it, and no other is."""
    for slot in range(slots.size):
        word = slots[slot]
        if word & (_RULE | _CONTINUES) != flags[slot] or (flags[slot] == 0 and word != _EMPTY):
            return False
    return True


@_njit
def is_rule(ids: Ids, start: int, length: int, slots: Words) -> bool:
    """Return whether ``length`` (2 .. 4) ids from ``start`` on are exactly one rule.

    A negative id is part of no rule.
    """
    parent = int(ids[start])
    if parent < 0:
        return False
    word = _EMPTY
    for offset in range(1, length):
        if ids[start + offset] < 0:
            return False
        key = _key(parent, ids[start + offset])
        slot = _find(key, _hash(key), slots)
        word = slots[slot]
        if word == _EMPTY:
            return False
        parent = _FIRST_NODE + slot
    return bool(word & _RULE != _EMPTY)


@_njit
def holds_shorter(ids: Ids, slots: Words) -> bool:
    """Return whether a rule of the trie lies inside one of the longer rules ``ids`` [R, n]."""
    for row in range(ids.shape[0]):
        for length in range(2, ids.shape[1]):
            for start in range(ids.shape[1] - length + 1):
                if is_rule(ids[row], start, length, slots):
                    return True
    return False


@_njit
def _longest(ids: Ids, position: int, end: int, slots: Words) -> int:
    """Return the length of the longest rule at ``position`` that ends by ``end``, or 1."""
    best = 1
    parent = int(ids[position])
    for length in range(2, min(LONGEST, end - position) + 1):
        key = _key(parent, ids[position + length - 1])
        slot = _find(key, _hash(key), slots)
        word = slots[slot]
        if word & _RULE != _EMPTY:
            best = length
        if word & _CONTINUES == _EMPTY:
            break
        parent = _FIRST_NODE + slot
    return best


@_njit
def segment(ids: Ids, offsets: Ints, slots: Words, pairs: Words) -> tuple[Ints, Ints, Ints]:
    """Cut sequences into units, longest rule first, left to right, by a trie and its bit set.

    Token ids [T] lie in 0 .. 2^18 - 1; borders [B + 1] begin with 0 and end with T.

    Returns:
        Starts [S], lengths [S], unit borders [B + 1].
    """
    starts = np.empty(ids.size, dtype=np.int64)
    lengths = np.empty(ids.size, dtype=np.int64)
    unit_offsets = np.zeros(offsets.size, dtype=np.int64)
    possible = np.zeros(_RING + 1, dtype=np.bool_)  # whether a rule may begin there
    ahead = 0
    units = 0
    for row in range(offsets.size - 1):
        position, end = offsets[row], offsets[row + 1]
        while position < end:
            while ahead <= min(position + _AHEAD, ids.size - 2):
                hashed = _hash(_key(ids[ahead], ids[ahead + 1]))
                possible[ahead & _RING] = _has_pair(hashed, pairs)
                if possible[ahead & _RING]:
                    prefetch(slots, _home(hashed, slots))
                ahead += 1
            length = 1
            if position + 1 < end and possible[position & _RING]:
                length = _longest(ids, position, end, slots)
            starts[units] = position
            lengths[units] = length
            units += 1
            position += length
        unit_offsets[row + 1] = units
    return starts[:units], lengths[:units], unit_offsets


@_njit
def advance(
    tokens: Ints, running: NDArray[np.bool_], recent: Ids, borders: Ints, slots: Words
) -> tuple[Ints, Ints, Ints]:
    """Add one token [B] to every running row [B] and merge what ends with it.

    A token outside 0 .. 2^18 - 1 is part of no rule. ``recent`` are the last four ids of each row
    [B, 4], oldest first; bit k of ``borders`` [B] is set where the id k places before the newest
    begins a unit. Both are changed.

    Returns:
        Units to take back [B], ids of the new unit [B, 4] (zeros behind it) and its length [B];
        zeros for the other rows.
    """
    rows = tokens.size
    rollback = np.zeros(rows, dtype=np.int64)
    spans = np.zeros((rows, LONGEST), dtype=np.int64)
    lengths = np.zeros(rows, dtype=np.int64)
    for row in range(rows):
        if not running[row]:
            continue
        window = recent[row]
        for place in range(LONGEST - 1):
            window[place] = window[place + 1]
        known = 0 <= tokens[row] <= MAX_TOKEN_ID
        window[-1] = np.int32(tokens[row]) if known else np.int32(-1)
        length = LONGEST
        # Before the shift the first id of a span of n was n - 2 places before the newest.
        while length > 1 and not (
            (borders[row] >> (length - 2)) & 1 and is_rule(window, LONGEST - length, length, slots)
        ):
            length -= 1
        for place in range(length - 1):
            rollback[row] += (borders[row] >> place) & 1
        older = (borders[row] << 1) & ~((1 << (length - 1)) - 1)
        borders[row] = (older | (1 << (length - 1))) & ((1 << (LONGEST - 1)) - 1)
        lengths[row] = length
        spans[row, :length] = window[LONGEST - length :]
        spans[row, length - 1] = tokens[row]
    return rollback, spans, lengths
