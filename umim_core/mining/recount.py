"""Exact occurrence and document counts of given n-grams, in one read-only pass.

Where ``counting`` finds the frequent n-grams of a corpus, this counts those of a list: the tables
never grow, nothing is shuffled, and workers only add up vectors. It serves the least number of
documents that a rule must occur in.

An n-gram belongs to the document of its first token. Ranges of tokens are cut at document borders
when documents are counted, so that no document is counted twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Final

import numba
import numpy as np

from umim_core.errors import CorpusError
from umim_core.mining.hashing import rank_index
from umim_core.mining.kernel import gram_ranks, next_ranks
from umim_core.rules.grams import ORDERS
from umim_core.text.token_ids import Ints, Offsets, Tokens, UniformOffsets, read_ids

_CHUNK_TOKENS: Final = 1 << 20
_TAIL: Final = ORDERS[-1] - 1
NO_DOCUMENTS: Final = np.zeros(0, dtype=np.int64)


@numba.njit(cache=True, nogil=True)
def _occurrences(ranks: Ints, stop: int, support: Ints) -> None:
    for position in range(stop):
        if ranks[position] >= 0:
            support[ranks[position]] += 1


@numba.njit(cache=True, nogil=True)
def _documents(
    ranks: Ints, stop: int, start: int, ends: Ints, first: int, last_seen: Ints, documents: Ints
) -> None:
    """Count each rank once per document; ``ends`` are global, ``start`` is that of the chunk."""
    document = first
    for position in range(stop):
        while start + position >= ends[document]:
            document += 1
        rank = ranks[position]
        if rank >= 0 and last_seen[rank] != document:
            last_seen[rank] = document
            documents[rank] += 1


class Recount:
    """Count given n-grams by sorted packed keys [R_n] per order, as in ``NgramCounts``.

    The prefix of every n-gram must be among those of order n - 1. Documents take 24 bytes per
    n-gram instead of 8. ``indexes`` are ``rank_index`` of the keys per order, shared by those that
    count the same keys; None builds them.

    Attributes:
        support: Occurrences [R_n] per order so far.
        documents: Documents [R_n] per order so far; empty where they are not counted.
    """

    def __init__(
        self,
        keys: Mapping[int, Ints],
        *,
        count_documents: bool = False,
        indexes: Mapping[int, Ints] | None = None,
    ) -> None:
        self._indexes = {n: rank_index(keys[n]) for n in ORDERS} if indexes is None else indexes
        self._none = np.zeros(1 << 18, dtype=np.bool_)
        self._counts_documents = count_documents
        self.support = {n: np.zeros(len(keys[n]), dtype=np.int64) for n in ORDERS}
        sizes = {n: len(keys[n]) if count_documents else 0 for n in ORDERS}
        self.documents = {n: np.zeros(sizes[n], dtype=np.int64) for n in ORDERS}
        self._last_seen = {n: np.full(sizes[n], -1, dtype=np.int64) for n in ORDERS}

    def add(
        self,
        ids: Tokens,
        offsets: Offsets,
        low: int = 0,
        high: int | None = None,
        document_ends: Ints = NO_DOCUMENTS,
    ) -> None:
        """Count the n-grams that start at tokens ``low`` .. ``high - 1`` of a corpus [T].

        Without ``high`` they are counted to its end. When documents are counted, ``low`` is the
        border of one, and their ``document_ends`` [D] are needed.
        """
        total = int(offsets[-1])
        end = total if high is None else min(high, total)
        if self._counts_documents and not (len(document_ends) and document_ends[-1] >= end):
            raise CorpusError(
                f"documents must reach token {end}",
                f"{len(document_ends)} ends, the last {document_ends[-1:].tolist()}",
                "Give the end of every document.",
            )
        ranks = np.empty(_CHUNK_TOKENS + _TAIL, dtype=np.int64)
        for start in range(low, end, _CHUNK_TOKENS):
            stop = min(start + _CHUNK_TOKENS, end)
            chunk = read_ids(ids, start, min(stop + _TAIL, total))
            borders = _borders(offsets, start, start + chunk.size)
            part = ranks[: chunk.size]
            gram_ranks(chunk, borders, 1, self._none, self._indexes[2], self._indexes[3], part)
            document = int(np.searchsorted(document_ends, start, side="right"))
            for n in ORDERS:
                next_ranks(chunk, borders, n, self._indexes[n], part)
                _occurrences(part, stop - start, self.support[n])
                if self._counts_documents:
                    seen, counted = self._last_seen[n], self.documents[n]
                    _documents(part, stop - start, start, document_ends, document, seen, counted)


def _borders(offsets: Offsets, low: int, high: int) -> Ints:
    """Return the segment borders in ``[low, high]`` with both ends, counted from ``low``."""
    if isinstance(offsets, UniformOffsets):
        inner = offsets[offsets.find(low + 1) : offsets.find(high)]
    else:
        inner = offsets[np.searchsorted(offsets, low + 1) : np.searchsorted(offsets, high)]
    return np.concatenate([[0], inner - low, [high - low]]).astype(np.int64)


def document_ranges(document_ends: Ints, total: int, parts: int) -> list[tuple[int, int]]:
    """Cut the tokens at document borders into at most ``parts`` ranges of about equal size."""
    targets = np.arange(1, parts) * total // parts
    inner = document_ends[
        np.minimum(np.searchsorted(document_ends, targets), len(document_ends) - 1)
    ]
    cuts = np.unique(np.concatenate([[0], np.minimum(inner, total), [total]]))
    return [(int(low), int(high)) for low, high in pairwise(cuts)]
