"""What mining a corpus will cost, from a law fitted on a sample of it.

The number of distinct n-grams grows with the corpus like a power whose exponent falls slowly: every
doubling multiplies it by the same factor (fitted on 2^17 .. 2^23 tokens of prose and code). So

    log2 D(T) = log2 D(S) + s * (1 + r + r^2 + ...),    one term for each doubling from S to T.

Time is what a token took on the largest sample. A corpus that repeats itself stays below the law.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np

from umim_core.errors import ResourceLimitError, RuleSetError
from umim_core.rules.candidates import sample_segments
from umim_core.rules.counting import CHUNK_TOKENS, NO_KEYS, OrderCounter, excluded_mask
from umim_core.rules.grams import ORDERS, Offsets, Tokens
from umim_core.rules.hashing import BYTES_PER_PAIR, index_bytes, rank_indexes, table_bytes

SAMPLE_TOKENS: Final = 1 << 21
_HALVINGS: Final = 3
_TOKEN_BYTES: Final = 4
_BUFFER_BYTES: Final = 24  # of a thread, per token of its chunk: ranks, keys, ids
_RULE_BYTES: Final = 70  # parquet and matcher tables
_COPIES: Final = 4  # of the frequent (key, count) pairs, while they are selected and sorted


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

    def check(self, prediction: Prediction) -> None:
        """Refuse a prediction beyond a limit.

        Raises:
            ResourceLimitError: If there is one.
        """
        total = sum(prediction.seconds.values())
        for name, unit, found, limit in (
            ("memory", 2.0**30, prediction.memory_bytes, self.memory_bytes),
            ("disk", 2.0**30, prediction.disk_bytes, self.disk_bytes),
            ("time", 3600.0, total, self.seconds),
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
        base_bytes: Memory of the process before it counts.
        threads: Threads of the sample.
    """

    distinct: dict[int, GrowthLaw]
    frequent: dict[int, GrowthLaw]
    seconds_per_token: dict[int, float]
    base_bytes: float
    threads: int

    def predict(
        self, tokens: int, *, block_tokens: int | None = None, workers: int = 1
    ) -> Prediction:
        """Return the cost of mining a corpus.

        Args:
            tokens: Its tokens.
            block_tokens: Tokens that one worker of a cluster counts before it sends its pairs;
                None in one process, which sends none.
            workers: Workers of the cluster; time is divided by them.
        """
        held = tokens if block_tokens is None else min(block_tokens, tokens)
        distinct = {n: self.distinct[n].at(held) for n in ORDERS}
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
        if block_tokens is not None:
            shuffled = BYTES_PER_PAIR * math.ceil(tokens / block_tokens) * sum(distinct.values())
        buffers = self.threads * CHUNK_TOKENS * _BUFFER_BYTES
        found = sum(frequent.values())
        return Prediction(
            tokens=tokens,
            memory_bytes=self.base_bytes + buffers + _TOKEN_BYTES * held + peak,
            disk_bytes=_TOKEN_BYTES * tokens + (BYTES_PER_PAIR + _RULE_BYTES) * found,
            shuffle_bytes=shuffled,
            seconds={f"count_{n}": self.seconds_per_token[n] * tokens / workers for n in ORDERS},
            distinct=distinct,
            frequent=frequent,
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
    if len(offsets) - 1 < 1 << (2 * _HALVINGS):
        raise RuleSetError(
            f"a prediction needs at least {1 << (2 * _HALVINGS)} segments",
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
            keys[n], _ = counter.table.frequent(tau)
            seconds[n] = (time.perf_counter() - began) / max(sizes[-1], 1)
            distinct[n].append(len(counter.table))
            frequent[n].append(len(keys[n]))
        base = base or resident_bytes()
    return CostLaw(
        {n: GrowthLaw.fit(sizes, distinct[n]) for n in ORDERS},
        {n: GrowthLaw.fit(sizes, frequent[n]) for n in ORDERS},
        seconds,
        base,
        threads,
    )
