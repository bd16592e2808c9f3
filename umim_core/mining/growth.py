"""Growth of the number of distinct n-grams with a corpus.

It grows like a power whose exponent falls slowly: every doubling multiplies it by the same factor
(seen on 2^18 .. 2^23 tokens of technical prose, docs/log.md). So

    log2 D(T) = log2 D(S) + s * (1 + r + r^2 + ...),    one term for each doubling from S to T.

A corpus that repeats itself stays below the law.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


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
