"""Bound on the memory of mining, before everything is counted.

A sample is counted. The shares of distinct and of frequent n-grams in the order that has most of
them are taken for those of every order of the whole corpus. Text repeats itself: distinct n-grams
of all orders together are 20 % of 10^6 tokens of technical prose and 11 % of 10^8.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from umim_core.errors import ResourceLimitError
from umim_core.mining.candidates import SAMPLE_TAU, sample_segments
from umim_core.mining.counting import (
    CHUNK_TOKENS,
    CHUNKS_PER_THREAD,
    OrderCounter,
    excluded_mask,
)
from umim_core.mining.hashing import BYTES_PER_PAIR, index_bytes, rank_indexes, table_bytes
from umim_core.mining.mining_options import SearchOptions
from umim_core.rules.grams import ORDERS
from umim_core.text.token_ids import Ints, Offsets, Tokens

_SAMPLE_TOKENS: Final = 1 << 21  # a fifth of a second
_GIB: Final = 2.0**30
_MAPPED_TOKENS: Final = 1 << 28  # what token shards keep mapped at a time
_TOKEN_BYTES: Final = 4
_COUNT_BYTES: Final = 8
_BUFFER_BYTES: Final = 24  # of a thread, per token of its chunk: ranks, keys, ids
_COPIES: Final = 6  # of the frequent (key, count) pairs, while they are selected and sorted


class Shares(NamedTuple):
    """N-grams per token of a corpus, in the order that has most.

    Attributes:
        distinct: Different candidates that are counted.
        frequent: Those that reach the threshold.
    """

    distinct: float
    frequent: float


def check_memory(
    limit: float | None,
    ids: Tokens,
    offsets: Offsets,
    search: SearchOptions,
    excluded: Iterable[int] = (),
    *,
    threads: int,
    at_a_time: int | None = None,
) -> None:
    """Refuse to mine where that may take more memory than a limit allows.

    Args:
        limit: In GiB, of one process, besides what it takes empty; None for no limit.
        ids: Token ids [T].
        offsets: Segment borders.
        search: What is looked for.
        excluded: Ids that take part in no n-gram.
        threads: Threads of the process.
        at_a_time: Tokens that a worker of a cluster counts before it sends its pairs; None for one
            process, which counts all of them into one table.

    Raises:
        ResourceLimitError: If it may.
    """
    if limit is None:
        return
    tokens = int(offsets[-1])
    shares = sample_shares(ids, offsets, search, excluded, threads=threads)
    memory = mining_memory(tokens, search, shares, threads=threads, at_a_time=at_a_time)
    if memory > limit * _GIB:
        raise ResourceLimitError(
            f"mining must take at most {limit:.4g} GiB of memory",
            f"up to {memory / _GIB:.4g} GiB for {tokens:,} tokens",
            "Raise tau or the limit, or use candidate mode (sample_tokens).",
        )


def sample_shares(
    ids: Tokens,
    offsets: Offsets,
    search: SearchOptions,
    excluded: Iterable[int] = (),
    *,
    threads: int,
) -> Shares:
    """Return distinct and frequent n-grams per token of a sample.

    Arguments are those of :func:`check_memory`.
    """
    sampled = search.counted_tokens(int(offsets[-1])) < int(offsets[-1])
    sample, borders = sample_segments(ids, offsets, _SAMPLE_TOKENS, seed=0)
    keys: dict[int, Ints] = {}
    distinct = frequent = 0
    for n in ORDERS:
        indexes = rank_indexes(keys, n)
        counter = OrderCounter(n, indexes, excluded_mask(excluded), threads=threads)
        counter.add(sample, borders)
        keys[n], _ = counter.frequent(SAMPLE_TAU if sampled else search.tau)
        distinct, frequent = max(distinct, len(counter.table)), max(frequent, len(keys[n]))
    tokens = max(1, len(sample))
    return Shares(distinct / tokens, frequent / tokens)


def mining_memory(
    tokens: int,
    search: SearchOptions,
    shares: Shares,
    *,
    threads: int,
    at_a_time: int | None = None,
) -> float:
    """Return the bytes at most that mining takes of a process, besides what it takes empty."""
    counted = search.counted_tokens(tokens)
    sampled = counted < tokens
    block = counted if sampled or at_a_time is None else min(at_a_time, counted)
    frequent, below = shares.frequent * counted, len(ORDERS) - 1
    shorter = below * (index_bytes(frequent) + BYTES_PER_PAIR * frequent)
    tables = table_bytes(shares.distinct * block) + shorter + _COPIES * BYTES_PER_PAIR * frequent
    memory = _working_bytes(block, threads) + tables
    grams = len(ORDERS) * frequent
    if sampled:
        held = tokens if at_a_time is None else min(at_a_time, tokens)
        grams = min(grams, float(search.max_candidates))
        memory = max(memory, _recount_bytes(held, grams, threads, 1 + threads))
    elif search.count_documents:
        memory = max(memory, _recount_bytes(tokens, grams, threads, 3 * threads))
    return memory


def _working_bytes(tokens: int, threads: int) -> float:
    buffered = threads * CHUNKS_PER_THREAD * CHUNK_TOKENS
    return float(buffered * _BUFFER_BYTES + min(tokens, _MAPPED_TOKENS) * _TOKEN_BYTES)


def _recount_bytes(tokens: int, grams: float, threads: int, vectors: int) -> float:
    """Return the memory of a pass that counts given n-grams into so many vectors."""
    tables = index_bytes(grams) + BYTES_PER_PAIR * grams + _COUNT_BYTES * grams * vectors
    return _working_bytes(tokens, threads) + tables
