"""Quality of sets of generated texts: repetition, diversity, perplexity, similarity to references.

n-grams are of token ids. Rep-n is a mean over texts, Dist-n pools all texts of a set. ROUGE and
chrF compare words and characters with held-out continuations; BERTScore and MAUVE compare stand-in
features (see ``text_metrics``), and their names say so: MAUVE's own are those of GPT-2-large.

Source: paper, "Generation Quality" (Rep-n, Dist-n, similarity); perplexity and cache figures are
ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from umim_core.backbone.backbone import Backbone
from umim_core.errors import MissingExtraError
from umim_core.evaluation.perplexity import perplexity
from umim_core.evaluation.text_metrics import BERTSCORE, TextFeatures, chrf, greedy_bertscore, rouge
from umim_core.inference.outputs import Row
from umim_core.merging.merged_model import MergedModel

MAUVE: Final = "mauve_stand_in_features"
FEWEST_TEXTS: Final = 20  # of MAUVE: two clusters of ten, the library's own least
_SEED: Final = 25  # of the clusters' first centres; the library's own
_BATCH: Final = 16


@dataclass(frozen=True)
class GenerationQuality:
    """Figures of one set of generated texts by name.

    Attributes:
        figures: ``rep_N`` and ``dist_N`` (0..1; NaN if no text has N tokens), ``ppl`` of the
            generated tokens under the base model given their prompts, mean ``tokens`` of a text,
            means over texts of ``token_reduction`` (of prompts), ``gen_kv_reduction`` 1 - U_T / T
            and ``cumulative_kv_reduction`` 1 - sum of U_t / sum of t, and of ``by_text``; MAUVE of
            the texts that are not empty, NaN of fewer than ``FEWEST_TEXTS``.
        by_text: Similarity of each text to its continuation by figure: the kinds of ROUGE, chrF
            (0..1) and BERTScore's F1; an empty text has 0.
    """

    figures: dict[str, float]
    by_text: dict[str, tuple[float, ...]]


def generation_quality(
    rows: Sequence[Row], backbone: Backbone, references: Sequence[str], features: TextFeatures
) -> GenerationQuality:
    texts = [row.ids for row in rows]
    decoded = [backbone.decode(list(text)) for text in texts]
    by_text, near = reference_similarity(decoded, references, features)
    figures = {
        **{f"rep_{n}": repetition(texts, n) for n in (2, 3, 4)},
        **{f"dist_{n}": distinct(texts, n) for n in (1, 2, 3, 4)},
        "ppl": continuation_perplexity([row.prompt_ids for row in rows], texts, backbone),
        "tokens": _mean([len(text) for text in texts]),
        "token_reduction": _mean([row.token_reduction for row in rows]),
        "gen_kv_reduction": _mean([row.gen_kv_reduction for row in rows]),
        "cumulative_kv_reduction": _mean([row.cumulative_kv_reduction for row in rows]),
        **{name: _mean(values) for name, values in by_text.items()},
        MAUVE: near,
    }
    return GenerationQuality(figures, by_text)


def repetition(texts: Sequence[Sequence[int]], n: int) -> float:
    """Compute Rep-n, 0..1: the mean over texts of 1 - different n-grams / all n-grams.

    A text with fewer than ``n`` token ids does not count; NaN if all have.
    """
    by_text = [grams for text in texts if (grams := _grams(text, n))]
    return _mean([1.0 - len(set(grams)) / len(grams) for grams in by_text])


def distinct(texts: Sequence[Sequence[int]], n: int) -> float:
    """Compute Dist-n, 0..1: different n-grams / all n-grams over all texts, ids [T_b] each.

    NaN if no text has ``n`` tokens.
    """
    grams = [gram for text in texts for gram in _grams(text, n)]
    return len(set(grams)) / len(grams) if grams else math.nan


def _grams(text: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(text[start : start + n]) for start in range(len(text) - n + 1)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def continuation_perplexity(
    prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], backbone: Backbone
) -> float:
    """Compute the perplexity of continuations under the base model, given their prompts.

    exp(mean negative log-probability over all tokens) of the continuations [T_b] behind raw prompts
    [P_b] of at least one token.
    """
    rows = [np.array([*p, *c], dtype=np.int64) for p, c in zip(prompts, continuations, strict=True)]
    base = MergedModel.without_merging(backbone)
    return perplexity(rows, base, _BATCH, [len(prompt) for prompt in prompts]).ppl


def mauve(texts: NDArray[np.floating], references: NDArray[np.floating]) -> float:
    """Return MAUVE of two sets of texts, 0..1; larger is nearer. The same sets give the same value.

    A text has a feature vector: [n, d], references [m, d]. MAUVE's own are the last token's. There
    are a tenth as many clusters as references; the library's own choice is a tenth of the smaller
    set, which would differ between sets of texts that are compared with the same references.
    """
    clusters = max(2, round(len(references) / 10))
    result = mauve_library()(
        p_features=references, q_features=texts, num_buckets=clusters, seed=_SEED
    )
    return float(result.mauve)


def mauve_library() -> Any:
    try:
        from mauve import compute_mauve
    except ImportError as error:
        raise MissingExtraError(
            "MAUVE needs mauve-text", str(error), "pip install 'umim[metrics]'"
        ) from error
    return compute_mauve


def reference_similarity(
    texts: Sequence[str], references: Sequence[str], features: TextFeatures
) -> tuple[dict[str, tuple[float, ...]], float]:
    """Compare texts with the continuations of their prompts, one by one and as sets.

    Returns:
        ``GenerationQuality.by_text``, and MAUVE.
    """
    states = features.of_tokens(texts), features.of_tokens(references)
    rows = [
        {
            **rouge([text], {"references": [reference]}),
            **chrf([text], {"references": [reference]}),
            BERTSCORE: greedy_bertscore(*of_pair),
        }
        for text, reference, *of_pair in zip(texts, references, *states, strict=True)
    ]
    last = [[text[-1] for text in part if len(text)] for part in states]
    enough = min(map(len, last)) >= FEWEST_TEXTS
    near = mauve(*(torch.stack(part).numpy() for part in last)) if enough else math.nan
    return {name: tuple(row[name] for row in rows) for name in rows[0]}, near
