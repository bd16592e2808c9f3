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
from umim_core.text.token_ids import MAX_TOKEN_ID, TOKEN_BITS, Ids, Ints

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

    def ids(self, order: int, rows: NDArray[np.bool_] | slice = slice(None)) -> Ids:
        """Return the token ids [R_n, n] of one order, rows ascending, or of some rows alone."""
        prefix, columns = self.keys[order][rows], []
        for lower in range(order - 1, 0, -1):
            columns.append(prefix & _TOKEN_MASK)
            prefix = prefix >> TOKEN_BITS
            if lower > 1:
                prefix = self.keys[lower][prefix]
        columns.append(prefix)
        return np.stack(columns[::-1], axis=1).astype(np.int32)

    def frequent(
        self, tau: int, min_documents: int = 1, longest: int | None = None
    ) -> tuple[dict[int, Ids], dict[int, Ints]]:
        """Return the ids [R_n, n] and counts [R_n] of grams that occur often enough, per order.

        They have at most ``longest`` tokens; None takes all orders that were counted.
        """
        rule = f"tau must be at least {self.tau}, the threshold of the counts"
        require(tau >= self.tau, RuleSetError, rule, tau, "Count again with a smaller tau.")
        rule = "min_documents must be 1, or above where documents were counted"
        remedy = "Count documents too."
        fits = min_documents == 1 or (min_documents > 1 and self.documents is not None)
        require(fits, RuleSetError, rule, min_documents, remedy)
        most = self.orders[-1]
        rule, longest = f"rules have at most {most} tokens, as what was counted", longest or most
        require(longest <= most, RuleSetError, rule, longest, "Count longer ones.")
        kept = {n: self.support[n] >= tau for n in orders_to(longest)}
        if self.documents is not None:
            kept = {n: kept[n] & (self.documents[n] >= min_documents) for n in kept}
        return {n: self.ids(n, kept[n]) for n in kept}, {n: self.support[n][kept[n]] for n in kept}


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
