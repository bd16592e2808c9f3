"""Generated text that carries the token reductions of its request, for lm-eval's samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Self

from umim_core.inference.outputs import RowOutput

REDUCTIONS: Final = ("prompt_tr", "gen_kv_tr", "cumulative_kv_tr")


class GeneratedText(str):
    """A text, and what its request saved; a plain string to everything else.

    Attributes:
        reductions: By name: ``prompt_tr``, (raw tokens - units) / raw tokens of the prompt;
            ``gen_kv_tr``, 1 - U_T / T; ``cumulative_kv_tr``, 1 - sum of U_t / sum of t, both over
            the T generated tokens that were fed.
    """

    reductions: Mapping[str, float]

    def __new__(cls, text: str, reductions: Mapping[str, float] | None = None) -> Self:
        """Make the text; a copy gets its reductions as state."""
        text_with_reductions = super().__new__(cls, text)
        text_with_reductions.reductions = dict(reductions or {})
        return text_with_reductions

    @classmethod
    def of_row(cls, text: str, row: RowOutput, tokens: int) -> Self:
        """Return a row's text with the row's reductions."""
        kv = (row.gen_kv_reduction, row.cumulative_kv_reduction)
        of_prompt = (tokens - row.prompt_units) / tokens
        return cls(text, dict(zip(REDUCTIONS, (of_prompt, *kv), strict=True)))
