"""BERTScore of answers with stand-in features: greedy matching of tokens by cosine.

The published scores read other weights: BERTScore those of RoBERTa-large, MAUVE those of
GPT-2-large. Features here are last hidden states of a causal model. They rank texts among each
other, and are called ``..._stand_in_features`` so that nobody compares them with published ones.

The formula is written out: bert-score takes every text of two tokens for an empty one, because
the two would be [CLS] and [SEP], which causal models do not add. No weights by rarity, no
rescaling by a baseline.

Source: Zhang et al., 2020, "BERTScore: Evaluating Text Generation with BERT", section 3.
Shapes: T tokens of a text, R of a reference, d hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import normalize

from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.evaluation.text_metrics.answers import mean_figures


@dataclass(frozen=True)
class TextFeatures:
    """Features of texts, each read alone."""

    backbone: Backbone

    @property
    def model(self) -> str:
        """Name of the model; of files their own name and a digest, no path of this machine."""
        place = Path(self.backbone.name)
        if not place.exists():
            return self.backbone.name
        return f"{place.resolve().name} ({self.backbone.fingerprint[:12]})"

    @property
    def label(self) -> str:
        return (
            f"stand-in features: hidden states of {self.model} after its last block and final norm"
        )

    @torch.no_grad()
    def of_tokens(self, texts: Sequence[str], batch_size: int = 16) -> list[Tensor]:
        """Return the features of every token of every text [T, d], float32 on the CPU."""
        most, device = self.backbone.max_positions, self.backbone.device
        ids = [self.backbone.encode(text)[:most] for text in texts]
        features: list[Tensor] = []
        for first in range(0, len(ids), batch_size):
            rows = ids[first : first + batch_size]
            longest = max(1, *map(len, rows))
            # Padding follows the texts, and no token of a causal model sees what follows it.
            padded = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
            states = self.backbone.hidden(self.backbone.embed(padded.to(device))).float().cpu()
            features += [state[: len(row)] for state, row in zip(states, rows, strict=True)]
        return features


@cache
def features_of(name: str) -> TextFeatures:
    return TextFeatures(load_backbone(name))


BERTSCORE: Final = "bertscore_stand_in_features"


def greedy_bertscore(text: Tensor, reference: Tensor) -> float:
    """Match every token [T, d] with the nearest of the reference [R, d]; all 0 where one is empty.

    ::

        text       (1, 0)  (0, 1)     cosines with the reference  1    0.6
        reference  (1, 0)  (3, 4)                                 0    0.8
        precision (1 + 0.8) / 2, recall (1 + 0.8) / 2, F1 0.9
    """
    if not (len(text) and len(reference)):
        return 0.0
    cosines = normalize(text.double(), dim=1) @ normalize(reference.double(), dim=1).T  # [T, R]
    precision, recall = float(cosines.amax(1).mean()), float(cosines.amax(0).mean())
    total = precision + recall
    return 2 * precision * recall / total if total > 0 else 0.0


def bertscore(texts: Sequence[str], row: Mapping[str, Any]) -> dict[str, float]:
    """Return the F1 by the features that the row names; of several references the best counts."""
    features = features_of(row["features"])
    references = features.of_tokens(row["references"])
    return mean_figures(
        [
            {BERTSCORE: max(greedy_bertscore(text, reference) for reference in references)}
            for text in features.of_tokens(texts)
        ]
    )
