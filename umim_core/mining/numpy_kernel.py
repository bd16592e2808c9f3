"""N-gram counting in plain numpy: for platforms without a compiler, and to check the kernel.

Blocks are counted by sorting and added up by sorting.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from umim_core.errors import CorpusError, RuleSetError
from umim_core.rules.grams import ORDERS
from umim_core.text.token_ids import TOKEN_BITS, Ints, check_offsets, check_range

_LOW_HALF: Final = np.int64((1 << 32) - 1)


def local_counts(
    ids: NDArray[np.integer],
    offsets: Ints,
    order: int,
    lower_keys: dict[int, Ints],
    excluded: NDArray[np.int64],
) -> tuple[Ints, Ints]:
    """Count the candidate n-grams of one block of whole segments.

    Args:
        ids: Token ids of the block, flat [T].
        offsets: Segment borders [num_segments + 1]; n-grams never cross one.
        order: n, 2 to 4.
        lower_keys: The frequent packed keys of orders 2 .. n-1 of the whole corpus.
        excluded: Ids that take part in no gram (special tokens), sorted.

    Returns:
        Sorted packed keys [K] and their counts [K] in this block.

    Raises:
        CorpusError: If ids are out of range or the borders do not cover them.
        RuleSetError: If the order is not 2, 3 or 4.
    """
    if order not in ORDERS:
        raise RuleSetError("an n-gram's order must be 2, 3 or 4", order, "Choose one of them.")
    check_range(ids)
    tokens = ids.astype(np.int64)
    check_offsets(offsets, tokens.size)
    ranks = tokens.copy()  # rank of the gram of the current order that starts here, -1 if none
    if excluded.size:
        ranks[np.isin(tokens, excluded)] = -1
    ends = np.repeat(offsets[1:], np.diff(offsets))
    room = ends - np.arange(tokens.size, dtype=np.int64)  # tokens left in the segment
    for lower in range(2, order):
        ranks = _rank(_packed(tokens, ranks, room, lower), lower_keys[lower])
    keys = _packed(tokens, ranks, room, order)
    return _unique_counts(keys[keys >= 0])


def _packed(tokens: Ints, ranks: Ints, room: Ints, order: int) -> Ints:
    """Return the key of the gram of ``order`` at each position, -1 where there can be none."""
    keys = np.full(tokens.size, -1, dtype=np.int64)
    starts = tokens.size - order + 1
    if starts <= 0:
        return keys
    usable = (room[:starts] >= order) & (ranks[:starts] >= 0) & (ranks[1 : starts + 1] >= 0)
    packed = (ranks[:starts] << TOKEN_BITS) | tokens[order - 1 :]
    keys[:starts][usable] = packed[usable]
    return keys


def _rank(keys: Ints, frequent: Ints) -> Ints:
    """Return each key's index in the sorted ``frequent`` keys, or -1."""
    if not frequent.size:
        return np.full(keys.size, -1, dtype=np.int64)
    index = np.minimum(np.searchsorted(frequent, keys), frequent.size - 1)
    return np.where(frequent[index] == keys, index, -1)


def _unique_counts(keys: Ints) -> tuple[Ints, Ints]:
    values, counts = np.unique(keys, return_counts=True)
    return values, counts.astype(np.int64)


def add_counts(parts: Iterable[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    """Add up (keys, counts) of several blocks; the result is sorted by key.

    Raises:
        CorpusError: If a count passes 2^63 - 1.
    """
    pairs = list(parts)
    keys = np.concatenate([np.zeros(0, np.int64), *(key for key, _ in pairs)])
    counts = np.concatenate([np.zeros(0, np.int64), *(count for _, count in pairs)])
    if not keys.size:
        return keys, counts
    order = np.argsort(keys, kind="stable")
    keys, counts = keys[order], counts[order]
    first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    # In two halves of 32 bits, so that a sum that does not fit is seen and not wrapped.
    low = np.add.reduceat(counts & _LOW_HALF, first)
    high = np.add.reduceat(counts >> 32, first) + (low >> 32)
    if counts.min() < 0 or high.max() >= 1 << 31:
        raise CorpusError(
            "an n-gram's count must lie in 0..2^63 - 1",
            f"{min(float(counts.min()), 0.0) or high.max() * 2.0**32:.3e}",
            "Mine the corpus in parts.",
        )
    return keys[first], (high << 32) | (low & _LOW_HALF)
