"""The rule trie: its two tables, and the compiled loops that know their layout.

The trie is one open-addressing hash table of 8-byte words; a node is the slot that it lies in, so
no child is stored::

    word    parent << 20 | token << 2 | continues << 1 | rule        0 where empty
    parent  the first token of a 2-gram, else 2^18 + slot of the node above

With the rules (1,2) and (1,2,3), if (1,2) lies in slot 7::

    slot 7      1 << 20          | 2 << 2 | 1 << 1 | 1
    elsewhere   (2^18 + 7) << 20 | 3 << 2 |          1

A walk is at most 16 tokens long, and an empty slot ends every search. A bit set next to the trie
holds the pairs that begin a rule: it fits the cache, and most positions of a text end there.

Both take 13 bytes per distinct prefix of two or more ids: at most 41 per rule of four, and about 28
for millions of rules, which share theirs. 600,000 rules take 40 ms to put in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from umim_core.rules.grams import MAX_LONGEST, pack_spans
from umim_core.text.token_ids import MAX_TOKEN_ID, TOKEN_BITS, Ids, Ints

Words = NDArray[np.uint64]

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
_LOAD: Final = 0.6  # 0.5 takes 5 bytes a rule more and gains nothing over the bit set
_BITS_PER_PAIR: Final = 6  # about one absent pair in seven passes
_T = TypeVar("_T", bound=np.generic)
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
def is_rule(ids: Ids, start: int, length: int, slots: Words) -> bool:
    """Return whether ``length`` (2 .. 16) ids from ``start`` on are exactly one rule.

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
    for length in range(2, min(MAX_LONGEST, end - position) + 1):
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

    A token outside 0 .. 2^18 - 1 is part of no rule. ``recent`` are the last ids of each row
    [B, longest], oldest first; bit k of ``borders`` [B] is set where the id k places before the
    newest begins a unit. Both are changed.

    Returns:
        Units to take back [B], ids of the new unit [B, longest] (zeros behind it) and its length
        [B]; zeros for the other rows.
    """
    rows, longest = recent.shape
    rollback = np.zeros(rows, dtype=np.int64)
    spans = np.zeros((rows, longest), dtype=np.int64)
    lengths = np.zeros(rows, dtype=np.int64)
    for row in range(rows):
        if not running[row]:
            continue
        window = recent[row]
        for place in range(longest - 1):
            window[place] = window[place + 1]
        known = 0 <= tokens[row] <= MAX_TOKEN_ID
        window[-1] = np.int32(tokens[row]) if known else np.int32(-1)
        length = longest
        # Before the shift the first id of a span of n was n - 2 places before the newest.
        while length > 1 and not (
            (borders[row] >> (length - 2)) & 1 and is_rule(window, longest - length, length, slots)
        ):
            length -= 1
        for place in range(length - 1):
            rollback[row] += (borders[row] >> place) & 1
        older = (borders[row] << 1) & ~((1 << (length - 1)) - 1)
        borders[row] = (older | (1 << (length - 1))) & ((1 << (longest - 1)) - 1)
        lengths[row] = length
        spans[row, :length] = window[longest - length :]
        spans[row, length - 1] = tokens[row]
    return rollback, spans, lengths


@dataclass(frozen=True)
class MatcherTables:
    """Arrays that the matcher reads: the trie [S] and the bit set of pairs that begin a rule [P].

    Both are uint64 and read-only.
    """

    slots: Words
    pairs: Words

    @property
    def nbytes(self) -> int:
        return self.slots.nbytes + self.pairs.nbytes

    @classmethod
    def build(cls, ids_by_order: dict[int, Ids]) -> MatcherTables:
        """Build the tables of rules [R_n, n] (int32) per order, rows ascending, ids < 2^18."""
        nodes, first_pairs = _prefix_counts(ids_by_order)
        size = int(nodes / _LOAD) + 1  # some stay free, which ends every search
        slots = np.zeros(size, dtype=np.uint64)
        pairs = np.zeros(first_pairs * _BITS_PER_PAIR // 64 + 1, dtype=np.uint64)
        for ids in read_only_rows(ids_by_order):
            insert(ids, slots, pairs)
        return cls(_read_only(slots), _read_only(pairs))


def read_only_rows(ids_by_order: dict[int, Ids]) -> list[Ids]:
    return [_read_only(np.ascontiguousarray(ids).view()) for ids in ids_by_order.values()]


def _prefix_counts(ids_by_order: dict[int, Ids]) -> tuple[int, int]:
    """Return how many prefixes of two or more ids the rules have, and how many of two.

    A prefix of up to three ids is packed as it is, a longer one with the place of the one before::

        (a b c d)   place of (a b c) << 18 | d
    """
    counts, longest = [0], max(ids_by_order)
    keys = {n: pack_spans(ids[:, :1]) for n, ids in ids_by_order.items()}
    for length in range(2, longest + 1):
        for n in range(length, longest + 1):
            keys[n] = (keys[n] << TOKEN_BITS) | ids_by_order[n][:, length - 1]
        reached = [keys[n] for n in range(length, longest + 1)]
        prefixes = np.sort(np.concatenate(reached), kind="stable")  # fast on runs in order
        counts.append(int(np.count_nonzero(np.diff(prefixes, prepend=-1))))
        if length >= 3:
            for n in range(length + 1, longest + 1):
                keys[n] = np.searchsorted(prefixes, keys[n])
    return sum(counts), counts[1]


def _read_only(array: NDArray[_T]) -> NDArray[_T]:
    """Forbid writing, so that the compiled loops see one type, whoever made the array."""
    array.flags.writeable = False
    return array
