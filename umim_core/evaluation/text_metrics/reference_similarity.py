"""Similarity of generated texts to held-out continuations: ROUGE, chrF, BERTScore and MAUVE.

ROUGE and chrF compare words and characters. BERTScore and MAUVE compare stand-in features (see
``bertscore``), and their names say so.

Source: paper, "Generation Quality".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from umim_core.errors import EvaluationError, MissingExtraError
from umim_core.evaluation.text_metrics.answers import mean_figures
from umim_core.evaluation.text_metrics.bertscore import BERTSCORE, TextFeatures, greedy_bertscore

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer


KINDS: Final = ("rouge1", "rouge2", "rougeL", "rougeLsum")
# rouge-score's own sentence splitter needs data that nltk downloads.
_SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s+")


def rouge(texts: Sequence[str], row: Mapping[str, Any]) -> dict[str, float]:
    """Return the four F1 scores, 0..1; of several references the best counts, kind by kind.

    For ROUGE-Lsum every sentence is a line.

    Source: Lin, 2004; the paper's summarisation tables.
    """
    references = [_lines(reference) for reference in row["references"]]
    figures = []
    for text in texts:
        scores = _scorer().score_multi(references, _lines(text))
        figures.append({kind: float(scores[kind].fmeasure) for kind in KINDS})
    return mean_figures(figures)


def _lines(text: str) -> str:
    return "\n".join(_SENTENCE_END.split(text.strip()))


@cache
def _scorer() -> RougeScorer:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise MissingExtraError(
            "ROUGE needs rouge-score", str(error), "pip install 'umim[eval]'"
        ) from error
    return RougeScorer(list(KINDS), use_stemmer=True)


MAUVE: Final = "mauve_stand_in_features"
FEWEST_TEXTS: Final = 20  # two clusters of ten, the library's own least
_SEED: Final = 25  # of the clusters' first centres; the library's own

Features = NDArray[np.floating]


def mauve(texts: Features, references: Features) -> float:
    """Return MAUVE of two sets of texts, 0..1; larger is nearer. The same sets give the same value.

    A text has a feature vector: [n, d], references [m, d]. MAUVE's own are the last token's. There
    are a tenth as many clusters as references; the library's own choice is a tenth of the smaller
    set, which would differ between sets of texts that are compared with the same references.
    """
    if min(len(texts), len(references)) < FEWEST_TEXTS:
        raise EvaluationError(
            f"MAUVE needs at least {FEWEST_TEXTS} texts and as many references",
            f"{len(texts)} and {len(references)}",
            "Generate from more prompts.",
        )
    result = _compute_mauve()(
        p_features=references,
        q_features=texts,
        num_buckets=max(2, round(len(references) / 10)),
        seed=_SEED,
    )
    return float(result.mauve)


def _compute_mauve() -> Any:
    try:
        from mauve import compute_mauve
    except ImportError as error:
        raise MissingExtraError(
            "MAUVE needs mauve-text", str(error), "pip install 'umim[metrics]'"
        ) from error
    return compute_mauve


def chrf(texts: Sequence[str], row: Mapping[str, Any]) -> dict[str, float]:
    """Return chrF, 0..1; of several references the best counts.

    Source: Popovic, 2015; paper, "Generation Quality".
    """
    try:
        from sacrebleu.metrics.chrf import CHRF
    except ImportError as error:
        raise MissingExtraError(
            "chrF needs sacrebleu", str(error), "pip install 'umim[eval]'"
        ) from error
    scorer, references = CHRF(), list(row["references"])
    scores = [scorer.sentence_score(text, references).score for text in texts]
    return mean_figures([{"chrf": float(score) / 100} for score in scores])


@dataclass(frozen=True)
class References:
    """Held-out continuations that several sets of texts are compared with."""

    texts: tuple[str, ...]
    features: TextFeatures

    @cached_property
    def states(self) -> list[Tensor]:
        return self.features.of_tokens(self.texts)


@dataclass(frozen=True)
class ReferenceSimilarity:
    """Figures of one set of generated texts; larger is nearer to the references.

    Attributes:
        by_text: Values of each text by figure: ``rouge1``, ``rouge2``, ``rougeL``, ``rougeLsum``
            and ``chrf`` (0..1), and BERTScore's F1; an empty text has 0.
        mauve: MAUVE of the texts that are not empty, 0..1; NaN of fewer than `FEWEST_TEXTS`.
    """

    by_text: Mapping[str, tuple[float, ...]]
    mauve: float

    def metrics(self) -> dict[str, float]:
        """Return all figures of the set by name: means over texts, and MAUVE."""
        means = {name: math.fsum(values) / len(values) for name, values in self.by_text.items()}
        return means | {MAUVE: self.mauve}


def require_libraries(texts: int) -> None:
    """Make sure that a comparison will find its libraries, before texts are generated for it."""
    word = {"references": ["word"]}
    rouge(["word"], word)
    chrf(["word"], word)
    if texts >= FEWEST_TEXTS:
        _compute_mauve()


def reference_similarity(texts: Sequence[str], references: References) -> ReferenceSimilarity:
    """Compare generated texts with the continuations of their prompts."""
    if not texts or len(texts) != len(references.texts):
        raise EvaluationError(
            "every generated text needs the continuation of its prompt",
            f"{len(texts)} texts, {len(references.texts)} continuations",
            "Keep as many tokens of the held-out text behind every prompt.",
        )
    states = references.features.of_tokens(texts)
    rows = [
        {
            **rouge([text], {"references": [reference]}),
            **chrf([text], {"references": [reference]}),
            BERTSCORE: greedy_bertscore(of_text, of_reference),
        }
        for text, reference, of_text, of_reference in zip(
            texts, references.texts, states, references.states, strict=True
        )
    ]
    by_text = {name: tuple(row[name] for row in rows) for name in rows[0]}
    last = [[text[-1] for text in part if len(text)] for part in (states, references.states)]
    enough = min(map(len, last)) >= FEWEST_TEXTS
    near = mauve(*(torch.stack(part).numpy() for part in last)) if enough else math.nan
    return ReferenceSimilarity(by_text, near)
