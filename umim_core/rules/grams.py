"""N-grams: packed keys, the counts of a corpus, and selection by count.

A gram of order n is packed into one int64: the rank of its frequent (n-1)-gram prefix, shifted by
18 bits, plus its last token.

Example (one segment, tau 2)::

    ids  1 2 3 1 2      2-grams (1,2):2 (2,3):1 (3,1):1      ->  kept (1,2):2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from umim_core.errors import RuleSetError, require
from umim_core.text.token_ids import MAX_TOKEN_ID, TOKEN_BITS, Ints

ORDERS: Final = (2, 3, 4)  # of rules in the paper, and of a set that is for no longer ones
LONGEST: Final = ORDERS[-1]
MAX_LONGEST: Final = 16
_TOKEN_MASK: Final = np.int64(MAX_TOKEN_ID)
_PACKED: Final = 63 // TOKEN_BITS  # ids of a key


@dataclass(frozen=True)
class NgramCounts:
    """Frequent n-grams of one corpus.

    Attributes:
        keys: Per order n from 2 on, sorted packed keys [R_n] (int64): prefix rank << 18 | last
            token, where the rank counts in ``keys[n - 1]`` (for n = 2: the first token itself).
        support: Per order n, occurrences [R_n] (int64), aligned with ``keys``.
        tau: The least count of a kept gram.
        documents: Per order n, documents [R_n] (int64) in which the gram occurs, or None where
            they were not counted.
    """

    keys: dict[int, Ints]
    support: dict[int, Ints]
    tau: int
    documents: dict[int, Ints] | None = None

    @property
    def orders(self) -> tuple[int, ...]:
        return tuple(self.keys)

    def __len__(self) -> int:
        return sum(len(keys) for keys in self.keys.values())

    def up_to(self, longest: int) -> NgramCounts:
        """Return the grams of at most so many tokens; refuse more than were counted."""
        rule = f"rules have at most {self.orders[-1]} tokens, as what was counted"
        remedy = "Count longer ones."
        require(longest <= self.orders[-1], RuleSetError, rule, longest, remedy)
        orders = orders_to(longest)
        keys, support = ({n: each[n] for n in orders} for each in (self.keys, self.support))
        documents = self.documents and {n: self.documents[n] for n in orders}
        return NgramCounts(keys, support, self.tau, documents)

    def check_reached(self, tau: int) -> None:
        """Refuse a threshold below the one that was counted with."""
        rule = f"tau must be at least {self.tau}, the threshold of the counts"
        require(tau >= self.tau, RuleSetError, rule, tau, "Count again with a smaller tau.")

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
    """
    counts.check_reached(tau)
    rule = "min_documents must be 1, or above where documents were counted"
    remedy = "Count documents too."
    fits = min_documents == 1 or (min_documents > 1 and counts.documents is not None)
    require(fits, RuleSetError, rule, min_documents, remedy)
    keys, support, documents = {}, {}, {}
    ranks: Ints | None = None  # new rank of every gram of the order below
    for n in counts.orders:
        keep = counts.support[n] >= tau
        if counts.documents is not None:
            keep &= counts.documents[n] >= min_documents
            documents[n] = counts.documents[n][keep]
        chosen = counts.keys[n][keep]
        if ranks is not None:
            chosen = (ranks[chosen >> TOKEN_BITS] << TOKEN_BITS) | (chosen & _TOKEN_MASK)
        keys[n], support[n] = chosen, counts.support[n][keep]
        ranks = np.cumsum(keep, dtype=np.int64) - 1
    return NgramCounts(keys, support, tau, documents or None)


def pack_spans(ids: NDArray[np.integer]) -> NDArray[Any]:
    """Pack rows of token ids [R, n] into keys [R] that sort like the rows.

    Keys are int64 for up to three ids; beyond, the bytes of the ids, the highest first.
    """
    width = ids.shape[1]
    if width > _PACKED:
        return np.ascontiguousarray(ids, dtype=">i4").reshape(-1).view(f"S{4 * width}")
    keys = np.zeros(ids.shape[0], dtype=np.int64)
    for column in range(width):
        keys = (keys << TOKEN_BITS) | ids[:, column].astype(np.int64)
    return keys


def orders_to(longest: int) -> tuple[int, ...]:
    """Return the orders of rules of up to ``longest`` tokens; those up to 4 are always there."""
    return tuple(range(2, max(LONGEST, longest) + 1))


def check_longest(longest: int) -> int:
    """Return the most tokens of a rule if rules may be so long."""
    rule = f"longest, the most tokens of a rule, must lie in {LONGEST}..{MAX_LONGEST}"
    remedy = f"Take {LONGEST} for prose, {MAX_LONGEST} for schemas, logs and tool results."
    require(LONGEST <= longest <= MAX_LONGEST, RuleSetError, rule, longest, remedy)
    return longest
