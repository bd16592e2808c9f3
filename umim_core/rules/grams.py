"""N-grams: packed keys, the counts of a corpus, and the checks of their inputs.

A gram of order n is packed into one int64: the rank of its frequent (n-1)-gram prefix, shifted by
18 bits, plus its last token.

Example (one segment, tau 2)::

    ids  1 2 3 1 2      2-grams (1,2):2 (2,3):1 (3,1):1      ->  kept (1,2):2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from umim_core.errors import CorpusError, RuleSetError

ORDERS: Final = (2, 3, 4)
TOKEN_BITS: Final = 18
MAX_TOKEN_ID: Final = (1 << TOKEN_BITS) - 1
_TOKEN_MASK: Final = np.int64(MAX_TOKEN_ID)

Ids = NDArray[np.int32]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class NgramCounts:
    """Frequent n-grams of one corpus.

    Attributes:
        keys: Per order n, sorted packed keys [R_n] (int64): prefix rank << 18 | last token, where
            the prefix rank counts in ``keys[n - 1]`` (for n = 2 it is the first token itself).
        support: Per order n, occurrences [R_n] (int64), aligned with ``keys``.
        tau: The least count of a kept gram.
        documents: Per order n, documents [R_n] (int64) in which the gram occurs, or None where
            they were not counted.
    """

    keys: dict[int, Ints]
    support: dict[int, Ints]
    tau: int
    documents: dict[int, Ints] | None = None

    def __len__(self) -> int:
        return sum(len(keys) for keys in self.keys.values())

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


def select(counts: NgramCounts, tau: int, min_documents: int = 1) -> NgramCounts:
    """Return the grams that occur often enough, with their keys packed anew.

    The prefix of a gram occurs wherever the gram does, and in the same documents (those of the
    first token), so every prefix that is needed is kept.

    Args:
        counts: Frequent grams.
        tau: Least count.
        min_documents: Least number of documents.

    Raises:
        RuleSetError: If ``tau`` is below the threshold of the counts, ``min_documents`` is below
            1, or above 1 where documents were not counted.
    """
    if tau < counts.tau:
        raise RuleSetError(
            f"tau must be at least {counts.tau}, the threshold of the counts",
            tau,
            "Count again with a smaller tau.",
        )
    if min_documents < 1 or (min_documents > 1 and counts.documents is None):
        raise RuleSetError(
            "min_documents must be 1, or above where documents were counted",
            min_documents,
            "Count documents too.",
        )
    keys, support, documents = {}, {}, {}
    ranks: Ints | None = None  # new rank of every gram of the order below
    for n in ORDERS:
        keep = counts.support[n] >= tau
        if counts.documents is not None:
            keep &= counts.documents[n] >= min_documents
            documents[n] = counts.documents[n][keep]
        kept = counts.keys[n][keep]
        if ranks is not None:
            kept = (ranks[kept >> TOKEN_BITS] << TOKEN_BITS) | (kept & _TOKEN_MASK)
        keys[n], support[n] = kept, counts.support[n][keep]
        ranks = np.cumsum(keep, dtype=np.int64) - 1
    return NgramCounts(keys, support, tau, documents or None)


class Tokens(Protocol):
    """Token ids that can be sliced: an array, memory-mapped or not, or token shards."""

    def __len__(self) -> int: ...

    def __getitem__(self, where: slice, /) -> NDArray[np.integer]: ...


@dataclass(frozen=True)
class UniformOffsets:
    """Borders of ``count`` segments of ``length`` tokens, without an array of them.

    Stands for ``np.arange(count + 1) * length``; for 1e12 tokens that would be 16 GB.
    """

    length: int
    count: int

    def __len__(self) -> int:
        return self.count + 1

    @overload
    def __getitem__(self, where: int) -> int: ...

    @overload
    def __getitem__(self, where: slice) -> Ints: ...

    def __getitem__(self, where: int | slice) -> int | Ints:
        if isinstance(where, slice):
            return np.arange(*where.indices(len(self)), dtype=np.int64) * self.length
        return range(len(self))[where] * self.length

    def find(self, position: int) -> int:
        """Return the first border at or after a position."""
        return -(-position // self.length)


Offsets = Ints | UniformOffsets
AnyOffsets = TypeVar("AnyOffsets", bound=Ints | UniformOffsets)


def check_ids(ids: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return token ids as int64 after checking their range.

    Raises:
        CorpusError: If the array is not 1-D or not of integers, or an id is outside 0 .. 2^18 - 1.
    """
    check_range(ids)
    return ids.astype(np.int64, copy=False)


def read_ids(ids: Tokens, low: int, high: int) -> Ids:
    """Return ``ids[low:high]`` as a plain, read-only int32 array after checking its range.

    Raises:
        CorpusError: If ids are missing, out of range or no flat array of integers.
    """
    chunk = np.asarray(ids[low:high])
    check_range(chunk)
    if chunk.size != high - low:  # what is missing would be counted as not there
        raise CorpusError(
            f"tokens {low} to {high} of the corpus must be there",
            f"{chunk.size} of {high - low}",
            "On a shared file system, wait until every machine sees the whole files; else "
            "tokenize the text again.",
        )
    view = np.ascontiguousarray(chunk, dtype=np.int32).view()
    view.flags.writeable = False  # so that the compiled loops have one signature
    return view


def check_flat(ids: Tokens) -> None:
    """Refuse an array of rows where one flat array is meant.

    Raises:
        CorpusError: If an array is not 1-D.
    """
    if isinstance(ids, np.ndarray) and ids.ndim != 1:
        raise CorpusError("token ids must be one flat array", f"{ids.ndim} dimensions", "Flatten.")


def check_range(ids: NDArray[np.integer]) -> None:
    """Check that an array holds token ids.

    Raises:
        CorpusError: If it is not 1-D or not of integers, or an id is outside 0 .. 2^18 - 1.
    """
    check_flat(ids)
    if ids.dtype.kind not in "iu":
        raise CorpusError("token ids must be integers", str(ids.dtype), "Tokenize the text first.")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > MAX_TOKEN_ID):
        raise CorpusError(
            f"token ids must lie in 0..{MAX_TOKEN_ID}",
            f"{int(ids.min())}..{int(ids.max())}",
            "Check the tokenizer; vocabularies of more than 2^18 entries are not supported.",
        )


def check_offsets(offsets: AnyOffsets, size: int) -> AnyOffsets:
    """Return borders if they cut ``size`` tokens into consecutive segments.

    Uniform segments may leave a remainder, which is dropped.

    Raises:
        CorpusError: If they do not begin with 0, fall, or do not end with ``size``.
    """
    if isinstance(offsets, UniformOffsets):
        whole = offsets.length > 0 and 0 <= offsets[-1] <= size
    else:
        whole = bool(len(offsets) and offsets[0] == 0 and offsets[-1] == size)
        whole = whole and not (offsets[1:] < offsets[:-1]).any()
    if not whole:
        raise CorpusError(
            f"segment borders must rise from 0 to {size}, the number of tokens",
            f"{len(offsets)} borders, {offsets[0] if len(offsets) else None} to "
            f"{offsets[-1] if len(offsets) else None}",
            "Give one border more than there are segments.",
        )
    return offsets


_MOST: Final = 2**63 - 1


def check_tau(tau: int) -> int:
    """Return ``tau`` if it is a usable threshold.

    Raises:
        RuleSetError: If it is below 1, or no count can reach it.
    """
    if tau < 1:
        raise RuleSetError("tau must be at least 1", tau, "Choose the least count of a rule.")
    if tau > _MOST:
        raise RuleSetError(f"tau must be at most {_MOST}", tau, "No count is larger.")
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
    check_range(ids)
    whole = ids.size // length
    kept = np.asarray(ids[: whole * length], dtype=np.int32)
    return kept, np.arange(whole + 1, dtype=np.int64) * length
