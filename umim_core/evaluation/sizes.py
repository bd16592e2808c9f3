"""Sizes of what a model reads: raw tokens, and the units or columns that stand for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# Of a generated text: see ``GeneratedText``.
REDUCTIONS: Final = ("prompt_tr", "gen_kv_tr", "cumulative_kv_tr")


@dataclass(frozen=True)
class Sizes:
    """Size of a model's input in raw tokens, and in the units that it reads in their place.

    ``tokens`` and ``units`` are of context and continuation, or of prompt and generated text;
    ``context_tokens`` and ``context_units`` of the context alone, 0 where it is not matched alone.
    """

    tokens: int = 0
    units: int = 0
    context_tokens: int = 0
    context_units: int = 0
    columns: int | None = None  # of a layer's KV cache that stayed of the context, if some went
    shortfall: int = 0  # tokens or columns that stayed of it beyond a baseline's budget

    def __add__(self, other: Sizes) -> Sizes:
        columns = [size.columns for size in (self, other) if size.columns is not None]
        return Sizes(
            self.tokens + other.tokens,
            self.units + other.units,
            self.context_tokens + other.context_tokens,
            self.context_units + other.context_units,
            sum(columns) if columns else None,
            self.shortfall + other.shortfall,
        )

    @property
    def token_reduction(self) -> float:
        """(raw tokens - units) / raw tokens; 0 of nothing."""
        return (self.tokens - self.units) / self.tokens if self.tokens else 0.0

    @property
    def context_token_reduction(self) -> float | None:
        """(raw tokens - units) / raw tokens of the context; None where it is not matched alone."""
        saved = self.context_tokens - self.context_units
        return saved / self.context_tokens if self.context_tokens else None

    @property
    def cache_reduction(self) -> float | None:
        """Share of the context that the KV cache does not hold; None as above."""
        if self.columns is None or not self.context_tokens:
            return self.context_token_reduction
        return (self.context_tokens - self.columns) / self.context_tokens

    def reductions(self) -> dict[str, float | None]:
        """Return the reductions by name, those of baselines where there are some."""
        found = {
            "token_reduction": self.token_reduction,
            "context_token_reduction": self.context_token_reduction,
        }
        if self.shortfall:
            found["shortfall"] = self.shortfall_share
        if self.columns is not None:
            found["cache_reduction"] = self.cache_reduction
        return found

    @property
    def shortfall_share(self) -> float:
        """Token reduction that is missing to what was asked for; 0 of nothing."""
        return self.shortfall / self.context_tokens if self.context_tokens else 0.0
