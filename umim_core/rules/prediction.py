"""What mining a corpus will cost, from a law fitted on a sample of it.

Tables grow with the number of distinct n-grams (:mod:`umim_core.rules.growth`); time is what a
token took on the largest sample.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Final

from umim_core.errors import ResourceLimitError, RuleSetError
from umim_core.rules.candidates import sample_segments
from umim_core.rules.counting import (
    CHUNK_TOKENS,
    CHUNKS_PER_THREAD,
    NO_KEYS,
    OrderCounter,
    excluded_mask,
)
from umim_core.rules.grams import ORDERS, Offsets, Tokens
from umim_core.rules.growth import GrowthLaw
from umim_core.rules.hashing import BYTES_PER_PAIR, index_bytes, rank_indexes, table_bytes
from umim_core.rules.recount import Recount

SAMPLE_TOKENS: Final = 1 << 21
BLOCKS_PER_WORKER: Final = 1
_MIN_BLOCK_TOKENS: Final = 1 << 21
_MAX_BLOCK_TOKENS: Final = 1 << 27  # about 1 GB of tables for prose
MIN_SEGMENTS: Final = 64
_HALVINGS: Final = 3
_GIB: Final = 2.0**30
_HOUR: Final = 3600.0
_TOKEN_BYTES: Final = 4
_COUNT_BYTES: Final = 8
_BUFFER_BYTES: Final = 24  # of a thread, per token of its chunk: ranks, keys, ids
_RULE_BYTES: Final = 70  # parquet and matcher tables
_COPIES: Final = 4  # of the frequent (key, count) pairs, while they are selected and sorted


def default_block_tokens(tokens: int, workers: int) -> int:
    """Return a block size that gives every worker work, and no table beyond about 1 GB."""
    share = math.ceil(tokens / (workers * BLOCKS_PER_WORKER))
    return min(max(share, _MIN_BLOCK_TOKENS), _MAX_BLOCK_TOKENS)


@dataclass(frozen=True)
class Prediction:
    """What mining is expected to take.

    Attributes:
        tokens: Tokens of the corpus.
        memory_bytes: Resident memory of a process that counts, at its peak.
        disk_bytes: Token shards, frequent n-grams and rules.
        shuffle_bytes: (key, count) pairs that move between the workers of a cluster.
        seconds: Per stage.
        distinct: Distinct candidate n-grams per order that such a process counts.
        frequent: Of these, how many reach tau.
    """

    tokens: int
    memory_bytes: float
    disk_bytes: float
    shuffle_bytes: float
    seconds: dict[str, float]
    distinct: dict[int, float]
    frequent: dict[int, float]

    def as_dict(self) -> dict[str, object]:
        """Return the numbers for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the numbers for people, one a line."""
        times = self.seconds
        rows = [
            ("tokens", f"{self.tokens:,}"),
            ("memory of a process", f"{self.memory_bytes / _GIB:.2f} GiB"),
            ("disk", f"{self.disk_bytes / _GIB:.2f} GiB"),
            ("shuffled", f"{self.shuffle_bytes / _GIB:.2f} GiB"),
            *((f"time, {name.replace('_', ' ')}", f"{times[name]:,.1f} s") for name in times),
            ("time, all", f"{sum(times.values()):,.1f} s"),
            *((f"frequent {n}-grams", f"{count:,.0f}") for n, count in self.frequent.items()),
        ]
        return [f"  {name:20}{value:>18}" for name, value in rows]


@dataclass(frozen=True)
class Limits:
    """What mining may take at most; None for no limit.

    Attributes:
        memory_bytes: Resident memory.
        disk_bytes: Disk.
        seconds: Time of all stages.
    """

    memory_bytes: float | None = None
    disk_bytes: float | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, gib_memory: float | None, gib_disk: float | None, hours: float | None) -> Limits:
        """Return limits given in GiB and hours."""
        given = ((gib_memory, _GIB), (gib_disk, _GIB), (hours, _HOUR))
        return cls(*(None if value is None else value * unit for value, unit in given))

    def check(self, prediction: Prediction) -> None:
        """Refuse a prediction beyond a limit.

        Raises:
            ResourceLimitError: If there is one.
        """
        total = sum(prediction.seconds.values())
        for name, unit, found, limit in (
            ("memory", _GIB, prediction.memory_bytes, self.memory_bytes),
            ("disk", _GIB, prediction.disk_bytes, self.disk_bytes),
            ("time", _HOUR, total, self.seconds),
        ):
            if limit is not None and found > limit:
                kind = "hours" if name == "time" else "GiB"
                raise ResourceLimitError(
                    f"mining must take at most {limit / unit:.3g} {kind} of {name}",
                    f"{found / unit:.3g} {kind} predicted for {prediction.tokens:,} tokens",
                    "Raise tau or the limit, or use candidate mode (sample_tokens).",
                )


@dataclass(frozen=True)
class CostLaw:
    """Growth of the tables and time per token, fitted on one corpus.

    Attributes:
        distinct: Law of the candidates counted, per order.
        frequent: Law of those that reach tau, per order.
        seconds_per_token: Per order, with the threads of the sample.
        recount_seconds_per_token: Of the pass that counts given n-grams, likewise.
        base_bytes: Memory of the process before it counts.
        threads: Threads of the sample.
    """

    distinct: dict[int, GrowthLaw]
    frequent: dict[int, GrowthLaw]
    seconds_per_token: dict[int, float]
    recount_seconds_per_token: float
    base_bytes: float
    threads: int

    def predict(
        self, tokens: int, *, workers: int | None = None, block_tokens: int | None = None
    ) -> Prediction:
        """Return the cost of mining a corpus.

        Args:
            tokens: Its tokens.
            workers: Workers of a cluster, each of one thread; None for one process.
            block_tokens: Tokens that a worker counts before it sends its pairs; None takes
                :func:`default_block_tokens`.
        """
        block = tokens
        if workers is not None:
            block = min(block_tokens or default_block_tokens(tokens, workers), tokens)
        distinct = {n: self.distinct[n].at(block) for n in ORDERS}
        frequent = {
            n: min(self.frequent[n].at(tokens), self.distinct[n].at(tokens)) for n in ORDERS
        }
        peak = 0.0
        for n in ORDERS:
            kept = sum(frequent[m] for m in ORDERS if m < n)
            indexes = sum(index_bytes(frequent[m]) for m in ORDERS if m < n)
            sorting = _COPIES * BYTES_PER_PAIR * frequent[n]
            peak = max(peak, table_bytes(distinct[n]) + indexes + BYTES_PER_PAIR * kept + sorting)
        shuffled = 0.0
        if workers is not None:
            shuffled = BYTES_PER_PAIR * math.ceil(tokens / block) * sum(distinct.values())
        found = sum(frequent.values())
        return Prediction(
            tokens=tokens,
            memory_bytes=self._working_bytes(block) + _TOKEN_BYTES * block + peak,
            disk_bytes=_TOKEN_BYTES * tokens + (BYTES_PER_PAIR + _RULE_BYTES) * found,
            shuffle_bytes=shuffled,
            seconds={
                f"count_{n}": self.seconds_per_token[n] * tokens / (workers or 1) for n in ORDERS
            },
            distinct=distinct,
            frequent=frequent,
        )

    def predict_candidates(
        self, tokens: int, sample_tokens: int, max_candidates: int, *, workers: int | None = None
    ) -> Prediction:
        """Return the cost of candidate mode; the law must be fitted at ``SAMPLE_TAU``.

        Args:
            tokens: Tokens of the corpus.
            sample_tokens: Tokens of the sample, counted in one process.
            max_candidates: Most candidates.
            workers: Workers of a cluster, each of one thread; None for one process.
        """
        sample = self.predict(min(sample_tokens, tokens))
        share = min(1.0, max_candidates / max(sum(sample.frequent.values()), 1.0))
        candidates = {n: share * count for n, count in sample.frequent.items()}
        found = sum(candidates.values())
        vectors = _COUNT_BYTES * found * (1 + (self.threads if workers is None else 1))
        held = tokens if workers is None else default_block_tokens(tokens, workers)
        tables = index_bytes(found) + BYTES_PER_PAIR * found + vectors
        return Prediction(
            tokens=tokens,
            memory_bytes=max(
                sample.memory_bytes, self._working_bytes(held) + _TOKEN_BYTES * held + tables
            ),
            disk_bytes=_TOKEN_BYTES * tokens + (BYTES_PER_PAIR + _RULE_BYTES) * found,
            shuffle_bytes=_COUNT_BYTES * found * BLOCKS_PER_WORKER * (workers or 0),
            seconds={
                "count_sample": sum(sample.seconds.values()),
                "recount": self.recount_seconds_per_token * tokens / (workers or 1),
            },
            distinct=sample.distinct,
            frequent=candidates,
        )

    def _working_bytes(self, tokens: int) -> float:
        return (
            self.base_bytes
            + min(self.threads * CHUNKS_PER_THREAD * CHUNK_TOKENS, tokens) * _BUFFER_BYTES
        )


def fit_cost_law(
    ids: Tokens,
    offsets: Offsets,
    tau: int,
    excluded: Iterable[int] = (),
    *,
    threads: int = 1,
    sample_tokens: int = SAMPLE_TOKENS,
    seed: int = 0,
    resident_bytes: Callable[[], float],
) -> CostLaw:
    """Count nested samples of a corpus and fit the law.

    Args:
        ids: Token ids [T].
        offsets: Segment borders [num_segments + 1].
        tau: Threshold of the mining to come.
        excluded: Ids that take part in no gram.
        threads: Threads of the mining to come.
        sample_tokens: Tokens of the largest sample.
        seed: Of the sample.
        resident_bytes: Returns the memory of this process; asked after the smallest sample, when
            the loops are compiled.

    Raises:
        RuleSetError: If the corpus has fewer than 64 segments, too few to be halved.
    """
    if len(offsets) - 1 < MIN_SEGMENTS:
        raise RuleSetError(
            f"a prediction needs at least {MIN_SEGMENTS} segments",
            len(offsets) - 1,
            "Mine without one: a corpus of this size takes seconds.",
        )
    sample, borders = sample_segments(ids, offsets, sample_tokens, seed)
    mask = excluded_mask(excluded)
    sizes, seconds, base = [], dict.fromkeys(ORDERS, 0.0), 0.0
    distinct: Mapping[int, list[int]] = {n: [] for n in ORDERS}
    frequent: Mapping[int, list[int]] = {n: [] for n in ORDERS}
    for halving in range(_HALVINGS, -1, -1):
        count = (len(borders) - 1) >> halving
        part = borders[: count + 1]
        sizes.append(int(part[-1]))
        keys = dict.fromkeys(ORDERS, NO_KEYS)
        for n in ORDERS:
            began = time.perf_counter()
            counter = OrderCounter(n, rank_indexes(keys, n), mask, threads=threads)
            counter.add(sample[: part[-1]], part)
            keys[n], _ = counter.frequent(tau)
            seconds[n] = (time.perf_counter() - began) / max(sizes[-1], 1)
            distinct[n].append(len(counter.table))
            frequent[n].append(len(keys[n]))
        base = base or resident_bytes()
    began = time.perf_counter()
    Recount(keys).add(sample, borders)
    return CostLaw(
        {n: GrowthLaw.fit(sizes, distinct[n]) for n in ORDERS},
        {n: GrowthLaw.fit(sizes, frequent[n]) for n in ORDERS},
        seconds,
        (time.perf_counter() - began) / len(sample) / threads,
        base,
        threads,
    )
