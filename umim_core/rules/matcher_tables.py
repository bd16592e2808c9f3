"""The matcher's tables: the rules as a hash trie, in memory or mapped from ``matcher/tables.npy``.

One array of 64-bit words, so that one check of its bytes covers all of it::

    0        layout version
    1        number of slots S
    2        1 if no rule lies inside another, for people: nothing relies on it
    3        0
    4 .. 7   SHA-256 of the rule set that it was made of
    8 ..     S slots, then the bit set of pairs (see ``trie``)

That is 13 bytes per distinct prefix of two or more ids: at most 41 per rule, and about 28 for
millions of rules, which share theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from umim_core.errors import ArtifactError
from umim_core.rules.filters import pack_spans
from umim_core.rules.grams import ORDERS
from umim_core.rules.trie import (
    Ids,
    Ints,
    Words,
    holds_only,
    holds_shorter,
    insert,
    mark,
    union,
)
from umim_core.store.arrays import open_array, save_array

LAYOUT: Final = 1
_HEADER: Final = 8  # words
_DIGEST: Final = slice(4, 8)
_LOAD: Final = 0.6  # 0.5 takes 5 bytes a rule more and gains nothing over the bit set
_BITS_PER_PAIR: Final = 6  # about one absent pair in seven passes
_MAX_SLOTS: Final = (1 << 32) - 1  # a slot is found by 32 bits of the hash
_DTYPE: Final = np.dtype("<u8")
_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True)
class MatcherTables:
    """Arrays that the matcher reads: the trie [S] and the bit set of pairs that begin a rule [P].

    Both are uint64 and read-only.
    """

    slots: Words
    pairs: Words

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.slots.nbytes + self.pairs.nbytes

    @classmethod
    def build(cls, ids_by_order: dict[int, Ids]) -> MatcherTables:
        """Build the tables of rules [R_n, n] (int32) per order, rows ascending, ids < 2^18."""
        pairs, triples = _prefixes(ids_by_order, 2), _prefixes(ids_by_order, 3)
        nodes = len(pairs) + len(triples) + len(ids_by_order[ORDERS[-1]])
        size = _size(nodes)
        if size > _MAX_SLOTS:
            raise ArtifactError(
                f"the rules must need at most {_MAX_SLOTS} slots", size, "Raise tau."
            )
        slots = np.zeros(size, dtype=np.uint64)
        bits = np.zeros(len(pairs) * _BITS_PER_PAIR // 64 + 1, dtype=np.uint64)
        for ids in _rows(ids_by_order):
            insert(ids, slots, bits)
        return cls(_read_only(slots), _read_only(bits))

    def infix_free(self, ids_by_order: dict[int, Ids]) -> bool:
        """Return whether none of the rules lies inside another."""
        return not any(holds_shorter(ids, self.slots) for ids in _rows(ids_by_order))

    def write(self, path: Path, digest: str, ids_by_order: dict[int, Ids]) -> None:
        """Write the tables as an array file, with the SHA-256 of their rule set (hex)."""
        header = np.zeros(_HEADER, dtype=_DTYPE)
        header[:3] = LAYOUT, len(self.slots), self.infix_free(ids_by_order)
        header[_DIGEST] = _digest_words(digest)
        save_array(path, np.concatenate([header, self.slots, self.pairs]))

    @classmethod
    def read(cls, path: Path, digest: str, ids_by_order: dict[int, Ids]) -> MatcherTables:
        """Map the tables of rules [R_n, n] with a SHA-256 (hex) from what :meth:`write` wrote.

        The bytes must have been checked against the manifest. Here every rule is looked up, so the
        tables hold these rules, no others, and no state that no rule passes.
        """
        words = open_array(path)
        if words.dtype != _DTYPE or words.ndim != 1 or words.size < _HEADER + 2:
            raise ArtifactError(
                f"{path} must be one row of at least {_HEADER + 2} unsigned 64-bit words",
                f"{words.dtype} {words.shape}",
                "Mine the rules again.",
            )
        layout, size, infix_free, reserved = (int(word) for word in words[:4])
        if layout != LAYOUT:
            raise ArtifactError(
                f"{path} must have layout {LAYOUT}",
                layout,
                "Use the version of umim that wrote it, or mine the rules again.",
            )
        slots, pairs = words[_HEADER : _HEADER + size], words[_HEADER + size :]
        whole = 0 < len(slots) == size and len(pairs) > 0 and infix_free in (0, 1) and not reserved
        own = whole and np.array_equal(words[_DIGEST], _digest_words(digest))
        if not own or not _hold(slots, pairs, ids_by_order):
            raise ArtifactError(
                f"{path} must be made of the rules in its folder", "other rules", "Mine them again."
            )
        return cls(slots, pairs)


def _hold(slots: Words, pairs: Words, ids_by_order: dict[int, Ids]) -> bool:
    """Return whether tables are those of the rules."""
    flags, bits = np.zeros(len(slots), dtype=np.uint8), np.zeros(len(pairs), dtype=np.uint64)
    return (
        all(mark(ids, slots, flags, bits) for ids in _rows(ids_by_order))
        and bool(holds_only(slots, flags))
        and len(slots) == _size(np.count_nonzero(flags))
        and np.array_equal(bits, pairs)
    )


def _rows(ids_by_order: dict[int, Ids]) -> list[Ids]:
    return [_read_only(np.ascontiguousarray(ids_by_order[n]).view()) for n in ORDERS]


def _size(nodes: int) -> int:
    """Return the slots of a table; some stay free, which ends every search."""
    return int(nodes / _LOAD) + 1


def _prefixes(ids_by_order: dict[int, Ids], length: int) -> Ints:
    """Return the different prefixes of ``length`` ids of all rules that are at least so long."""
    prefixes = np.zeros(0, dtype=np.int64)
    for n in ORDERS:
        if n >= length:
            prefixes = union(prefixes, pack_spans(ids_by_order[n][:, :length]))
    return prefixes


def _digest_words(digest: str) -> Words:
    return np.frombuffer(bytes.fromhex(digest), dtype=_DTYPE)


def _read_only(array: NDArray[_T]) -> NDArray[_T]:
    """Forbid writing: arrays in memory and mapped ones have one type for the compiled loops."""
    array.flags.writeable = False
    return array
