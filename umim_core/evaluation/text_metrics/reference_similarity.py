"""Similarity of generated texts to held-out continuations: ROUGE, chrF, BERTScore and MAUVE.

ROUGE and chrF compare words and characters. BERTScore and MAUVE compare stand-in features (see
``text_features``), and their names say so.

Source: paper, "Generation Quality".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from umim_core.errors import EvaluationError
from umim_core.evaluation.text_metrics.bertscore import BERTSCORE, greedy_bertscore
from umim_core.evaluation.text_metrics.chrf import chrf
from umim_core.evaluation.text_metrics.mauve import FEWEST_TEXTS, MAUVE, mauve, require_mauve
from umim_core.evaluation.text_metrics.rouge import rouge
from umim_core.evaluation.text_metrics.text_features import TextFeatures


@dataclass(frozen=True)
class References:
    """Held-out continuations that several sets of texts are compared with."""

    texts: tuple[str, ...]
    features: TextFeatures

    @cached_property
    def states(self) -> list[Tensor]:
        """Features of every continuation's tokens [T, d]."""
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
    """Make sure that a comparison will find its libraries, before texts are generated for it.

    Raises:
        MissingExtraError: If one is not installed; the message has the command.
    """
    word = {"references": ["word"]}
    rouge(["word"], word)
    chrf(["word"], word)
    if texts >= FEWEST_TEXTS:
        require_mauve()


def reference_similarity(texts: Sequence[str], references: References) -> ReferenceSimilarity:
    """Compare generated texts with the continuations of their prompts.

    Raises:
        EvaluationError: If there is no text, or not a reference for each.
        MissingExtraError: If a library of the metrics is not installed.
    """
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
            BERTSCORE: greedy_bertscore(own, other).f1,
        }
        for text, reference, own, other in zip(
            texts, references.texts, states, references.states, strict=True
        )
    ]
    by_text = {name: tuple(row[name] for row in rows) for name in rows[0]}
    return ReferenceSimilarity(by_text, _mauve(states, references.states))


def _mauve(states: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return MAUVE of the states of the last tokens."""
    own, other = ([text[-1] for text in part if len(text)] for part in (states, others))
    if min(len(own), len(other)) < FEWEST_TEXTS:
        return math.nan
    return mauve(torch.stack(own).numpy(), torch.stack(other).numpy())
