"""Exact n-gram counting over token segments, one order at a time.

A gram of order n is packed into one int64: the rank of its frequent (n-1)-gram prefix, shifted by
18 bits, plus its last token. Both (n-1)-grams inside a frequent n-gram are frequent themselves
(Apriori), so everything else is dropped before it is sorted. Counting a block and adding blocks up
are separate functions: one process and a cluster run the same code.

Example (one segment, tau 2)::

    ids  1 2 3 1 2      2-grams (1,2):2 (2,3):1 (3,1):1      ->  kept (1,2):2
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from umim_core.errors import CorpusError, RuleSetError

ORDERS: Final = (2, 3, 4)
TOKEN_BITS: Final = 18
MAX_TOKEN_ID: Final = (1 << TOKEN_BITS) - 1
_TOKEN_MASK: Final = np.int64(MAX_TOKEN_ID)
_LOW_HALF: Final = np.int64((1 << 32) - 1)

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class NgramCounts:
    """Frequent n-grams of one corpus.

    Attributes:
        keys: Per order n, sorted packed keys [R_n] (int64): prefix rank << 18 | last token, where
            the prefix rank counts in ``keys[n - 1]`` (for n = 2 it is the first token itself).
        support: Per order n, occurrences [R_n] (int64), aligned with ``keys``.
        tau: The least count of a kept gram.
    """

    keys: dict[int, Ints]
    support: dict[int, Ints]
    tau: int

    def ids(self, order: int) -> NDArray[np.int32]:
        """Return the token ids [R_n, n] (int32) of one order, rows ascending."""
        columns = [self.keys[order] & _TOKEN_MASK]
        prefix = self.keys[order] >> TOKEN_BITS
        for lower in range(order - 1, 1, -1):
            packed = self.keys[lower][prefix]
            columns.append(packed & _TOKEN_MASK)
            prefix = packed >> TOKEN_BITS
        columns.append(prefix)
        return np.stack(columns[::-1], axis=1).astype(np.int32)


def check_ids(ids: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return token ids as int64 after checking their range.

    Raises:
        CorpusError: If the array is not 1-D or not of integers, or an id is outside 0 .. 2^18 - 1.
    """
    _check_range(ids)
    return ids.astype(np.int64, copy=False)


def _check_range(ids: NDArray[np.integer]) -> None:
    if ids.ndim != 1:
        raise CorpusError("token ids must be one flat array", f"{ids.ndim} dimensions", "Flatten.")
    if ids.dtype.kind not in "iu":
        raise CorpusError("token ids must be integers", str(ids.dtype), "Tokenize the text first.")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > MAX_TOKEN_ID):
        raise CorpusError(
            f"token ids must lie in 0..{MAX_TOKEN_ID}",
            f"{int(ids.min())}..{int(ids.max())}",
            "Check the tokenizer; vocabularies of more than 2^18 entries are not supported.",
        )


def check_offsets(offsets: Ints, size: int) -> Ints:
    """Return borders if they cut ``size`` tokens into consecutive segments.

    Raises:
        CorpusError: If they do not begin with 0, fall, or do not end with ``size``.
    """
    whole = len(offsets) and offsets[0] == 0 and offsets[-1] == size
    if not whole or (np.diff(offsets) < 0).any():
        raise CorpusError(
            f"segment borders must rise from 0 to {size}, the number of tokens",
            offsets.tolist(),
            "Give one border more than there are segments.",
        )
    return offsets


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
    """
    tokens = check_ids(ids)
    check_offsets(offsets, tokens.size)
    ranks = tokens.copy()  # rank of the gram of the current order that starts here, -1 if none
    if excluded.size:
        ranks[np.isin(tokens, excluded)] = -1
    ends = np.repeat(offsets[1:], np.diff(offsets))
    room = ends - np.arange(tokens.size, dtype=np.int64)  # tokens left in the segment
    for current in range(2, order + 1):
        keys = _packed(tokens, ranks, room, current)
        if current == order:
            return _unique_counts(keys[keys >= 0])
        ranks = _rank(keys, lower_keys[current])
    raise RuleSetError("an n-gram's order must be 2, 3 or 4", order, "Choose one of them.")


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


def count_ngrams(
    ids: NDArray[np.integer],
    offsets: Ints,
    tau: int,
    excluded: Iterable[int] = (),
    max_order: int = ORDERS[-1],
) -> NgramCounts:
    """Count all 2-, 3- and 4-grams that occur at least ``tau`` times, in one process.

    Args:
        ids: Token ids, flat [T], 0 .. 2^18 - 1.
        offsets: Segment borders [num_segments + 1] (int64), first 0, last T.
        tau: Least count, at least 1; overlapping occurrences count.
        excluded: Ids that take part in no gram.
        max_order: Longest order to count; longer ones are empty in the result.

    Returns:
        The frequent grams per order.

    Raises:
        CorpusError: If ids are out of range.
        RuleSetError: If ``tau`` is below 1.

    Source: paper, "N-gram Extraction and Frequency Counting".
    """
    check_tau(tau)
    dropped = np.unique(np.array(sorted(excluded), dtype=np.int64))
    none = np.zeros(0, dtype=np.int64)
    counts = NgramCounts(dict.fromkeys(ORDERS, none), dict.fromkeys(ORDERS, none), tau)
    for order in range(ORDERS[0], max_order + 1):
        keys, support = local_counts(ids, offsets, order, counts.keys, dropped)
        keep = support >= tau
        counts.keys[order], counts.support[order] = keys[keep], support[keep]
    return counts


def check_tau(tau: int) -> int:
    """Return ``tau`` if it is a usable threshold.

    Raises:
        RuleSetError: If it is below 1.
    """
    if tau < 1:
        raise RuleSetError("tau must be at least 1", tau, "Choose the least count of a rule.")
    return tau


def cut_segments(ids: NDArray[np.integer], length: int) -> tuple[NDArray[np.int32], Ints]:
    """Cut a token stream into segments of ``length`` tokens; the remainder is dropped.

    Returns:
        The kept ids, flat (int32; a view where they are int32 already), and the borders
        [num_segments + 1] (int64).

    Raises:
        CorpusError: If the length is below 2 or an id is out of range.
    """
    if length < 2:
        raise CorpusError("a segment must hold at least 2 tokens", length, "Raise segment_length.")
    _check_range(ids)
    whole = ids.size // length
    kept = np.asarray(ids[: whole * length], dtype=np.int32)
    return kept, np.arange(whole + 1, dtype=np.int64) * length
