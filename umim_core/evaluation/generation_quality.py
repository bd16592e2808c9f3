"""Quality of generated texts: repetition, diversity, perplexity, similarity to references.

n-grams are of token ids. Rep-n is a mean over texts, Dist-n pools all texts of a set.

Source: paper, "Generation Quality" (Rep-n, Dist-n, similarity); perplexity and cache figures are
ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from umim_core.backbone.backbone import Backbone
from umim_core.errors import EvaluationError
from umim_core.evaluation.perplexity import perplexity
from umim_core.evaluation.text_metrics.reference_similarity import (
    References,
    ReferenceSimilarity,
    reference_similarity,
)
from umim_core.inference.rows import Row
from umim_core.merging.merged_model import MergedModel

REPETITION_ORDERS: Final = (2, 3, 4)
DISTINCT_ORDERS: Final = (1, 2, 3, 4)
Gram = tuple[int, ...]


@dataclass(frozen=True)
class GenerationQuality:
    """Figures of one set of generated texts; reductions are means over texts.

    Attributes:
        repetition: Rep-n by n, 0..1; NaN if no text has n tokens.
        distinct: Dist-n by n, 0..1; NaN if no text has n tokens.
        ppl: Perplexity of the generated tokens under the base model given their prompts.
        tokens: Mean generated tokens per text.
        token_reduction: TR of the prompts.
        gen_kv_reduction: Gen-KV TR of the texts, 1 - U_T / T.
        cumulative_kv_reduction: Cumulative KV TR, 1 - sum of U_t / sum of t.
        similarity: Similarity to the held-out continuations; None without them.
    """

    repetition: dict[int, float]
    distinct: dict[int, float]
    ppl: float
    tokens: float
    token_reduction: float
    gen_kv_reduction: float
    cumulative_kv_reduction: float
    similarity: ReferenceSimilarity | None = None

    def metrics(self) -> dict[str, float]:
        return {
            **{f"rep_{n}": value for n, value in self.repetition.items()},
            **{f"dist_{n}": value for n, value in self.distinct.items()},
            "ppl": self.ppl,
            "tokens": self.tokens,
            "token_reduction": self.token_reduction,
            "gen_kv_reduction": self.gen_kv_reduction,
            "cumulative_kv_reduction": self.cumulative_kv_reduction,
            **({} if self.similarity is None else self.similarity.metrics()),
        }


def repetition(texts: Sequence[Sequence[int]], n: int) -> float:
    """Compute Rep-n, 0..1: the mean over texts of 1 - different n-grams / all n-grams.

    A text with fewer than ``n`` token ids does not count; NaN if all have.
    """
    grams = [text_grams for text in texts if (text_grams := _grams(text, n))]
    return _mean([1.0 - len(set(text_grams)) / len(text_grams) for text_grams in grams])


def distinct(texts: Sequence[Sequence[int]], n: int) -> float:
    """Compute Dist-n, 0..1: different n-grams / all n-grams over all texts, ids [T_b] each.

    NaN if no text has ``n`` tokens.
    """
    grams = [gram for text in texts for gram in _grams(text, n)]
    return len(set(grams)) / len(grams) if grams else math.nan


def continuation_perplexity(
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    backbone: Backbone,
    batch_size: int = 16,
) -> float:
    """Compute the perplexity of continuations under the base model, given their prompts.

    exp(mean negative log-probability over all tokens) of the continuations [T_b] behind raw prompts
    [P_b] of at least one token.
    """
    if len(prompts) != len(continuations) or not any(map(len, continuations)):
        raise EvaluationError(
            "every prompt needs its continuation, and one of them a token",
            f"{len(prompts)} prompts, {len(continuations)} continuations, "
            f"{sum(map(len, continuations))} tokens",
            "Generate at least one token.",
        )
    rows = [
        np.array([*prompt, *continuation], dtype=np.int64)
        for prompt, continuation in zip(prompts, continuations, strict=True)
    ]
    lengths = [len(prompt) for prompt in prompts]
    result = perplexity(rows, MergedModel.without_merging(backbone), batch_size, lengths)
    return math.exp(result.nll_sum / result.targets)


def generation_quality(
    rows: Sequence[Row],
    backbone: Backbone,
    references: References | None = None,
) -> GenerationQuality:
    texts = [row.ids for row in rows]
    prompts = [row.prompt_ids for row in rows]
    return GenerationQuality(
        repetition={n: repetition(texts, n) for n in REPETITION_ORDERS},
        distinct={n: distinct(texts, n) for n in DISTINCT_ORDERS},
        ppl=continuation_perplexity(prompts, texts, backbone),
        tokens=_mean([len(text) for text in texts]),
        token_reduction=_mean([row.token_reduction for row in rows]),
        gen_kv_reduction=_mean([row.gen_kv_reduction for row in rows]),
        cumulative_kv_reduction=_mean([row.cumulative_kv_reduction for row in rows]),
        similarity=None
        if references is None
        else reference_similarity([backbone.decode(list(text)) for text in texts], references),
    )


def _grams(text: Sequence[int], n: int) -> list[Gram]:
    return [tuple(text[start : start + n]) for start in range(len(text) - n + 1)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
