"""Candidate mode: choose n-grams on a sample, then count exactly those on the whole corpus.

Counting everything needs memory for every distinct n-gram of the corpus. Where that is too much,
the frequent n-grams of a sample are candidates; one read-only pass counts them exactly
(:mod:`umim_core.mining.recount`). Every count is then exact; what can go wrong is that an n-gram is
no candidate, and how likely that is, is reported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from umim_core.errors import RuleSetError
from umim_core.rules.grams import ORDERS, NgramCounts, select
from umim_core.text.token_ids import Ids, Ints, Offsets, Tokens, read_ids

GROUP_SEGMENTS: Final = 64
SAMPLE_TAU: Final = 2


@dataclass(frozen=True)
class CandidateReport:
    """Sample that the candidates come from, and the risk of having missed one.

    Attributes:
        fraction: Share of the tokens that were sampled.
        candidates: Number of candidates counted.
        sample_tau: Least count of a candidate in the sample.
        miss_probability: Probability that an n-gram with exactly the final threshold was no
            candidate, if occurrences fell into the sample independently (Poisson); n-grams that
            cluster in few documents are missed more often, more frequent ones far less.
    """

    fraction: float
    candidates: int
    sample_tau: int
    miss_probability: float


def sample_segments(ids: Tokens, offsets: Offsets, tokens: int, seed: int) -> tuple[Ids, Ints]:
    """Return a random sample of whole segments, in groups of neighbours.

    Full groups are chosen; a shorter one at the end is taken only where all are.

    Args:
        ids: Token ids [T].
        offsets: Segment borders [num_segments + 1].
        tokens: Tokens to sample, about.
        seed: Of the choice.

    Returns:
        The sampled ids [S] (int32) and their segment borders (int64); everything where the corpus
        is no larger.

    Raises:
        RuleSetError: If ``tokens`` is below 1.
    """
    if tokens < 1:
        raise RuleSetError("a sample must hold at least 1 token", tokens, "Raise sample_tokens.")
    segments, total = len(offsets) - 1, int(offsets[-1])
    groups = -(-segments // GROUP_SEGMENTS)
    wanted = min(groups, max(1, math.ceil(groups * tokens / max(total, 1))))
    full = segments // GROUP_SEGMENTS
    chosen = np.arange(groups)
    if wanted <= full:  # the rest of a group at the end may be one segment: no sample
        chosen = np.sort(np.random.default_rng(seed).choice(full, wanted, replace=False))
    parts, sizes = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
    for group in chosen:
        low = int(group) * GROUP_SEGMENTS
        borders = offsets[low : low + GROUP_SEGMENTS + 1]
        parts.append(read_ids(ids, int(borders[0]), int(borders[-1])))
        sizes.append(np.diff(borders))
    borders = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(sizes))])
    return np.concatenate(parts), borders


def choose_candidates(sample: NgramCounts, limit: int) -> NgramCounts:
    """Return the n-grams of a sample above the lowest threshold that leaves at most ``limit``.

    Raises:
        RuleSetError: If ``limit`` is below 1.
    """
    if limit < 1:
        raise RuleSetError("there must be room for a candidate", limit, "Raise max_candidates.")
    support = np.sort(np.concatenate([sample.support[n] for n in ORDERS]))[::-1]
    if len(support) <= limit:
        return sample
    # All n-grams with the count of the first one that does not fit are left out.
    return select(sample, int(support[limit]) + 1)


def miss_probability(tau: int, fraction: float, sample_tau: int) -> float:
    """Return P(X < sample_tau) for X ~ Poisson(fraction * tau); ``sample_tau`` is at least 1."""
    mean = fraction * tau
    if mean <= 0:  # segments without tokens were sampled
        return 1.0
    terms = (
        math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))
        for count in range(sample_tau)
    )
    return min(sum(terms), 1.0)
