"""Cost law of mining, fitted on a sample of the corpus.

Tables grow with the number of distinct n-grams. That grows like a power whose exponent falls
slowly: every doubling multiplies it by the same factor (seen on 2^18 .. 2^23 tokens of technical
prose, dev/log.md). So

    log2 D(T) = log2 D(S) + s * (1 + r + r^2 + ...),    one term for each doubling from S to T.

A corpus that repeats itself stays below the law. Time is what a token took on the largest sample.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from umim_core.cost.prediction import Prediction, gib
from umim_core.errors import RuleSetError
from umim_core.mining.candidates import sample_segments
from umim_core.mining.counting import (
    CHUNK_TOKENS,
    CHUNKS_PER_THREAD,
    NO_KEYS,
    OrderCounter,
    excluded_mask,
)
from umim_core.mining.hashing import BYTES_PER_PAIR, index_bytes, rank_indexes, table_bytes
from umim_core.mining.mining_options import SearchOptions
from umim_core.mining.recount import Recount
from umim_core.rules.grams import ORDERS
from umim_core.text.token_ids import Ids, Ints, Offsets, Tokens, read_ids

SAMPLE_TOKENS: Final = 1 << 21
_MIN_BLOCK_TOKENS: Final = 1 << 21
_MAX_BLOCK_TOKENS: Final = 1 << 27  # about 1 GB of tables for prose
MIN_SEGMENTS: Final = 64
_HALVINGS: Final = 3
_ENOUGH: Final = 100  # frequent n-grams in a sample, to say how many more there will be
_SPREAD: Final = (0.85, 0.925, 1.0, 1.075, 1.15)
_MAPPED_TOKENS: Final = 1 << 28  # what token shards keep mapped at a time
_TOKEN_BYTES: Final = 4
_COUNT_BYTES: Final = 8
_BUFFER_BYTES: Final = 24  # of a thread, per token of its chunk: ranks, keys, ids
_RULE_BYTES: Final = 70  # parquet and matcher tables
_COPIES: Final = 6  # of the frequent (key, count) pairs, while they are selected and sorted


def default_block_tokens(tokens: int, workers: int) -> int:
    """Return a block size that gives every worker work, and no table beyond about 1 GB."""
    return min(max(math.ceil(tokens / workers), _MIN_BLOCK_TOKENS), _MAX_BLOCK_TOKENS)


@dataclass(frozen=True)
class GrowthLaw:
    """Number of distinct things against tokens read.

    Attributes:
        tokens: Tokens of the largest sample.
        value: Number found there.
        exponent: Of the next doubling.
        decay: Factor on the exponent with each further doubling, 0.5 .. 1.
    """

    tokens: float
    value: float
    exponent: float
    decay: float

    @classmethod
    def fit(cls, tokens: list[int], values: list[int]) -> GrowthLaw:
        """Fit the law to samples of which each has twice the tokens of the one before."""
        logs = np.log2(np.maximum(np.array(values, dtype=float), 1.0))
        slopes = np.maximum(np.diff(logs), 1e-3)
        falling = np.polyfit(np.arange(len(slopes)), np.log(slopes), 1)
        decay = float(np.clip(np.exp(falling[0]), 0.5, 1.0))
        # Least squares for the level once the decay is known.
        level = float(np.mean(np.log(slopes) - np.log(decay) * np.arange(len(slopes))))
        exponent = math.exp(level) * decay ** len(slopes)
        return cls(float(tokens[-1]), float(values[-1]), exponent, decay)

    def at(self, tokens: float) -> float:
        """Return the number expected after so many tokens."""
        doublings = math.log2(max(tokens, 1.0) / self.tokens)
        if doublings <= 0:  # within the sample: the exponent it ended with
            return float(self.value * 2 ** (self.exponent * doublings))
        falling = self.decay < 1.0
        terms = (1 - self.decay**doublings) / (1 - self.decay) if falling else doublings
        return float(self.value * 2 ** (self.exponent * terms))


@dataclass(frozen=True)
class MiningLaw:
    """Growth of the tables and time per token, fitted on one corpus.

    Attributes:
        distinct: Law of the candidates counted, per order.
        frequent: Law of those that reach tau, per order.
        seconds_per_token: Per order, with the threads of the sample.
        recount_seconds_per_token: Of the pass that counts given n-grams, likewise.
        base_bytes: Memory of the process before it counts.
        threads: Threads of the sample.
        tau: Threshold of the sample.
    """

    distinct: dict[int, GrowthLaw]
    frequent: dict[int, GrowthLaw]
    seconds_per_token: dict[int, float]
    recount_seconds_per_token: float
    base_bytes: float
    threads: int
    tau: int

    def predict(
        self,
        tokens: int,
        search: SearchOptions,
        *,
        workers: int | None = None,
        block_tokens: int | None = None,
    ) -> Prediction:
        """Return the cost of mining a corpus; where documents are counted, without their borders.

        Args:
            tokens: Its tokens.
            search: What is looked for; candidate mode needs a law fitted at ``SAMPLE_TAU``.
            workers: Workers of a cluster, each of one thread; None for one process.
            block_tokens: Tokens that a worker counts before it sends its pairs; None takes
                :func:`default_block_tokens`.
        """
        threads = self.threads if workers is None else 1
        counted = search.counted_tokens(tokens)
        exact, block = counted == tokens, counted
        if exact and workers is not None:
            block = min(block_tokens or default_block_tokens(tokens, workers), tokens)
        distinct = {n: min(self.distinct[n].at(block), float(block)) for n in ORDERS}
        frequent = {n: self._frequent(n, counted) for n in ORDERS}
        memory = self._working_bytes(block) + _tables_bytes(distinct, frequent)
        cores = (workers or 1) if exact else 1
        seconds = {f"count_{n}": self.seconds_per_token[n] * counted / cores for n in ORDERS}
        recounting = self.recount_seconds_per_token * tokens / (workers or 1)
        shuffled = 0.0
        if exact and workers is not None:
            shuffled = BYTES_PER_PAIR * math.ceil(tokens / block) * sum(distinct.values())
        if not exact:
            share = min(1.0, search.max_candidates / max(sum(frequent.values()), 1.0))
            frequent = {n: share * count for n, count in frequent.items()}
            held = tokens if workers is None else default_block_tokens(tokens, workers)
            memory = max(memory, self._recounting_bytes(held, frequent, 1 + threads))
            shuffled = _COUNT_BYTES * sum(frequent.values()) * (workers or 0)
            seconds = {"count_sample": sum(seconds.values()), "recount": recounting}
        if search.count_documents:
            memory = max(memory, self._recounting_bytes(tokens, frequent, 3 * threads))
            seconds["documents"] = recounting
        sample = int(self.distinct[ORDERS[0]].tokens)
        kept_bytes = (BYTES_PER_PAIR + _RULE_BYTES) * sum(frequent.values())
        return Prediction(
            work="mining",
            basis=f"{tokens:,} tokens",
            remedy="Raise tau or the limit, or use candidate mode (sample_tokens).",
            memory_bytes=memory,
            disk_bytes=_TOKEN_BYTES * tokens + kept_bytes,
            seconds=seconds,
            figures={
                "tokens": tokens,
                "shuffle_bytes": shuffled,
                "distinct": distinct,
                "frequent": frequent,
                "sample_tokens": sample,
            },
            notes={
                "shuffled": gib(shuffled),
                **{f"frequent {n}-grams": f"{count:,.0f}" for n, count in frequent.items()},
                "fitted on": f"a sample of {sample:,} tokens",
            },
        )

    def _frequent(self, order: int, tokens: int) -> float:
        """Return the n-grams expected to reach tau; the most there can be where few were seen."""
        most = min(self.distinct[order].at(tokens), tokens / self.tau)
        law = self.frequent[order]
        seen = law.value >= _ENOUGH or tokens <= law.tokens
        return min(law.at(tokens), most) if seen else most

    def _working_bytes(self, tokens: int) -> float:
        buffered = min(self.threads * CHUNKS_PER_THREAD * CHUNK_TOKENS, tokens)
        mapped = min(tokens, _MAPPED_TOKENS)
        return self.base_bytes + buffered * _BUFFER_BYTES + mapped * _TOKEN_BYTES

    def _recounting_bytes(self, tokens: int, grams: dict[int, float], vectors: int) -> float:
        """Return the memory of a pass that counts given n-grams into so many vectors."""
        found = sum(grams.values())
        tables = index_bytes(found) + BYTES_PER_PAIR * found + _COUNT_BYTES * found * vectors
        return self._working_bytes(tokens) + tables


def _tables_bytes(distinct: dict[int, float], frequent: dict[int, float]) -> float:
    """Return the peak of the tables of an order with the frequent n-grams of those below."""
    peak = 0.0
    for n in ORDERS:
        kept = sum(frequent[m] for m in ORDERS if m < n)
        indexes = sum(index_bytes(frequent[m]) for m in ORDERS if m < n)
        sorting = _COPIES * BYTES_PER_PAIR * frequent[n]
        # The size of a table jumps when it grows; the law cannot say when exactly.
        table = sum(table_bytes(share * distinct[n]) for share in _SPREAD) / len(_SPREAD)
        peak = max(peak, table + indexes + BYTES_PER_PAIR * kept + sorting)
    return peak


def fit_mining_law(
    ids: Tokens,
    offsets: Offsets,
    tau: int,
    excluded: Iterable[int] = (),
    *,
    threads: int = 1,
    sample_tokens: int = SAMPLE_TOKENS,
    seed: int = 0,
    resident_bytes: Callable[[], float],
) -> MiningLaw:
    """Count nested samples of a corpus and fit the law.

    Args:
        ids: Token ids [T].
        offsets: Segment borders [num_segments + 1].
        tau: Threshold of the mining to come.
        excluded: Ids that take part in no gram.
        threads: Threads of the mining to come.
        sample_tokens: Tokens of the largest sample.
        seed: Of the sample.
        resident_bytes: Returns the memory of this process; asked when the loops are compiled.

    Raises:
        RuleSetError: If the corpus has fewer than 64 segments, too few to be halved.
    """
    if len(offsets) - 1 < MIN_SEGMENTS:
        raise RuleSetError(
            f"a prediction needs at least {MIN_SEGMENTS} segments",
            len(offsets) - 1,
            "Mine without one: a corpus of this size takes seconds.",
        )
    mask = excluded_mask(excluded)
    # The loops are compiled, and the memory is asked for, before the sample takes some itself.
    few = offsets[: MIN_SEGMENTS + 1]
    _count_sample(read_ids(ids, 0, int(few[-1])), few, mask, tau, threads)
    base = resident_bytes()
    sample, borders = sample_segments(ids, offsets, sample_tokens, seed)
    sizes: list[int] = []
    distinct: Mapping[int, list[int]] = {n: [] for n in ORDERS}
    frequent: Mapping[int, list[int]] = {n: [] for n in ORDERS}
    for halving in range(_HALVINGS, -1, -1):
        part = borders[: ((len(borders) - 1) >> halving) + 1]
        sizes.append(int(part[-1]))
        found, keys, seconds = _count_sample(sample[: part[-1]], part, mask, tau, threads)
        for n in ORDERS:
            distinct[n].append(found[n])
            frequent[n].append(len(keys[n]))
    began = time.perf_counter()
    Recount(keys).add(sample, borders)
    return MiningLaw(
        {n: GrowthLaw.fit(sizes, distinct[n]) for n in ORDERS},
        {n: GrowthLaw.fit(sizes, frequent[n]) for n in ORDERS},
        seconds,
        (time.perf_counter() - began) / len(sample) / threads,
        base,
        threads,
        tau,
    )


def _count_sample(
    ids: Ids, offsets: Ints, mask: NDArray[np.bool_], tau: int, threads: int
) -> tuple[dict[int, int], dict[int, Ints], dict[int, float]]:
    """Count a sample; return distinct n-grams, frequent keys and seconds per token by order."""
    keys, found, seconds = dict.fromkeys(ORDERS, NO_KEYS), {}, {}
    for n in ORDERS:
        began = time.perf_counter()
        counter = OrderCounter(n, rank_indexes(keys, n), mask, threads=threads)
        counter.add(ids, offsets)
        keys[n], _ = counter.frequent(tau)
        seconds[n] = (time.perf_counter() - began) / max(ids.size, 1)
        found[n] = len(counter.table)
    return found, keys, seconds
