"""What an n-gram is here: its packed key, the counts of a corpus, and the checks of their inputs.

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
    """Return ``ids[low:high]`` as a plain int32 array after checking its range."""
    chunk = np.asarray(ids[low:high])
    check_range(chunk)
    return np.ascontiguousarray(chunk, dtype=np.int32)


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

    Raises:
        CorpusError: If they do not begin with 0, fall, or do not end with ``size``.
    """
    whole = len(offsets) and offsets[0] == 0 and offsets[-1] == size
    falling = isinstance(offsets, np.ndarray) and (offsets[1:] < offsets[:-1]).any()
    if not whole or falling:
        raise CorpusError(
            f"segment borders must rise from 0 to {size}, the number of tokens",
            f"{len(offsets)} borders, {offsets[0] if len(offsets) else None} to "
            f"{offsets[-1] if len(offsets) else None}",
            "Give one border more than there are segments.",
        )
    return offsets


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
    check_range(ids)
    whole = ids.size // length
    kept = np.asarray(ids[: whole * length], dtype=np.int32)
    return kept, np.arange(whole + 1, dtype=np.int64) * length
