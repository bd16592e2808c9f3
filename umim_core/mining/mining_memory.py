"""Bound on the memory of mining, before everything is counted.

A sample is counted. The shares of distinct and of frequent n-grams in the order that has most of
them are taken for those of every order of the whole corpus. Text repeats itself: distinct n-grams
of all orders together are 20 % of 10^6 tokens of technical prose and 11 % of 10^8.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from umim_core.config.rule_options import RuleOptions
from umim_core.errors import ResourceLimitError, require
from umim_core.mining.counting import (
    BYTES_PER_PLACE,
    CHUNK_TOKENS,
    CHUNKS_PER_THREAD,
    OrderCounter,
    Places,
    excluded_mask,
)
from umim_core.mining.hashing import BYTES_PER_PAIR, index_bytes, rank_indexes, table_bytes
from umim_core.rules.grams import LONGEST, orders_to
from umim_core.text.token_ids import AnyInts, Ints, Offsets, flat, read_ids, spread_rows

_SAMPLE_TOKENS: Final = 1 << 21  # a fifth of a second
_GIB: Final = 2.0**30
_COUNT_BYTES: Final = 8
_BUFFER_BYTES: Final = 24  # of a thread, per token of its chunk: ranks, keys, ids
_COPIES: Final = 6  # of the frequent (key, count) pairs, while they are selected and sorted


class Shares(NamedTuple):
    """N-grams per token of a corpus, in the order that has most."""

    distinct: float
    frequent: float


def check_memory(
    ids: AnyInts,
    offsets: Offsets,
    options: RuleOptions,
    excluded: Iterable[int] = (),
    *,
    threads: int,
    at_a_time: int | None = None,
) -> None:
    """Refuse to mine ids [T] where that may take more memory than the limit of the options.

    A worker of a cluster counts tokens ``at_a_time`` before it sends its pairs; one process (None)
    counts all of them into one table.
    """
    if (limit := options.max_memory_gib) is None:
        return
    tokens = int(offsets[-1])
    shares = sample_shares(ids, offsets, options, excluded, threads=threads)
    memory = mining_memory(tokens, options, shares, threads=threads, at_a_time=at_a_time)
    rule = f"mining must take at most {limit:.4g} GiB of memory"
    found = f"up to {memory / _GIB:.4g} GiB for {tokens:,} tokens"
    remedy = "Raise tau or the limit, or mine less text."
    require(memory <= limit * _GIB, ResourceLimitError, rule, found, remedy)


def sample_shares(
    ids: AnyInts,
    offsets: Offsets,
    options: RuleOptions,
    excluded: Iterable[int] = (),
    *,
    threads: int,
) -> Shares:
    """Return distinct and frequent n-grams per token of a sample of evenly spread segments."""
    segments, tokens = len(offsets) - 1, max(1, int(offsets[-1]))
    chosen = spread_rows(segments, max(1, segments * _SAMPLE_TOKENS // tokens))
    sample, borders = flat([read_ids(ids, int(offsets[i]), int(offsets[i + 1])) for i in chosen])
    keys: dict[int, Ints] = {}
    places: Places = {}
    distinct = frequent = 0
    for n in orders_to(options.longest):
        indexes, dropped = rank_indexes(keys, n), excluded_mask(excluded)
        counter = OrderCounter(n, indexes, dropped, threads=threads, places=places)
        counter.add(sample, borders)
        keys[n], _ = counter.frequent(options.tau)
        distinct, frequent = max(distinct, len(counter.table)), max(frequent, len(keys[n]))
    return Shares(distinct / max(1, len(sample)), frequent / max(1, len(sample)))


def mining_memory(
    tokens: int,
    options: RuleOptions,
    shares: Shares,
    *,
    threads: int,
    at_a_time: int | None = None,
) -> float:
    """Return the bytes at most that mining takes of a process, besides what it takes empty."""
    block = tokens if at_a_time is None else min(at_a_time, tokens)
    orders = orders_to(options.longest)
    frequent, below = shares.frequent * tokens, len(orders) - 1
    indexes = min(below, LONGEST - 1) * index_bytes(frequent)  # places stand for those below
    shorter = indexes + below * BYTES_PER_PAIR * frequent
    if options.longest > LONGEST and at_a_time is None:
        shorter += BYTES_PER_PLACE * tokens
    tables = table_bytes(shares.distinct * block) + shorter + _COPIES * BYTES_PER_PAIR * frequent
    working = float(threads * CHUNKS_PER_THREAD * CHUNK_TOKENS * _BUFFER_BYTES)
    memory = working + tables
    if options.count_documents:  # a pass that counts documents into two vectors a thread
        grams = len(orders) * frequent
        vectors = 2 * threads * _COUNT_BYTES * grams
        memory = max(memory, working + index_bytes(grams) + BYTES_PER_PAIR * grams + vectors)
    return memory
