"""BERTScore of answers with stand-in features: greedy matching of tokens by cosine.

The formula is written out: bert-score takes every text of two tokens for an empty one, because
the two would be [CLS] and [SEP], which causal models do not add. No weights by rarity, no
rescaling by a baseline.

Source: Zhang et al., 2020, "BERTScore: Evaluating Text Generation with BERT", section 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor
from torch.nn.functional import normalize

from umim_core.evaluation.text_metrics.text_features import features_of
from umim_core.evaluation.text_metrics.text_metric import add_text_metric, mean_figures

BERTSCORE: Final = "bertscore_stand_in_features"


@dataclass(frozen=True)
class BertScore:
    """BERTScore of one text; each figure is at most 1.

    Attributes:
        precision: Mean over the text's tokens of the best cosine with a token of the reference.
        recall: Mean over the reference's tokens of the best cosine with a token of the text.
        f1: Harmonic mean of both; 0 where they do not add up to more than 0.
    """

    precision: float
    recall: float
    f1: float


def greedy_bertscore(text: Tensor, reference: Tensor) -> BertScore:
    """Match every token with the nearest of the other text.

    ::

        text       (1, 0)  (0, 1)     cosines with the reference  1    0.6
        reference  (1, 0)  (3, 4)                                 0    0.8
        precision (1 + 0.8) / 2, recall (1 + 0.8) / 2, F1 0.9

    Args:
        text: Features of the text's tokens [T, d].
        reference: Features of the reference's tokens [R, d].

    Returns:
        The score; all 0 where either has no token.
    """
    if not (len(text) and len(reference)):
        return BertScore(0.0, 0.0, 0.0)
    cosines = normalize(text.double(), dim=1) @ normalize(reference.double(), dim=1).T  # [T, R]
    precision, recall = float(cosines.amax(1).mean()), float(cosines.amax(0).mean())
    total = precision + recall
    return BertScore(precision, recall, 2 * precision * recall / total if total > 0 else 0.0)


@add_text_metric("bertscore", BERTSCORE, needs_features=True)
def bertscore(texts: Sequence[str], row: Mapping[str, Any]) -> dict[str, float]:
    """Return the F1 by the features that the row names; of several references the best counts.

    Raises:
        BackboneError: If the features' model cannot be loaded.
    """
    features = features_of(row["features"])
    references = features.of_tokens(row["references"])
    return mean_figures(
        [
            {BERTSCORE: max(greedy_bertscore(text, reference).f1 for reference in references)}
            for text in features.of_tokens(texts)
        ]
    )
