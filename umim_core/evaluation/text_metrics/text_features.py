"""Stand-in features of texts for BERTScore and MAUVE: last hidden states of a causal model.

The published scores read other weights: BERTScore those of RoBERTa-large, MAUVE those of
GPT-2-large. Figures of other features rank texts among each other, and are called
``..._stand_in_features`` so that nobody compares them with published ones.

Shapes: T tokens of a text, d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from umim_core.backbone.backbone import Backbone, load_backbone


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
        """The features in words, for results."""
        return (
            f"stand-in features: hidden states of {self.model} after its last block and final norm"
        )

    @torch.no_grad()
    def of_tokens(self, texts: Sequence[str], batch_size: int = 16) -> list[Tensor]:
        """Return the features of every token of every text.

        Returns:
            Per text [T, d], float32 on the CPU.

        Raises:
            BackboneError: If the model has no tokenizer.
        """
        most, device = self.backbone.max_positions, self.backbone.device
        ids = [self.backbone.encode(text)[:most] for text in texts]
        features: list[Tensor] = []
        for first in range(0, len(ids), batch_size):
            rows = ids[first : first + batch_size]
            longest = max(1, *map(len, rows))
            # Padding follows the texts, and no token of a causal model sees what follows it.
            padded = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
            states = self.backbone.hidden(self.backbone.embed(padded.to(device))).float().cpu()
            features += [own[: len(row)] for own, row in zip(states, rows, strict=True)]
        return features


@cache
def features_of(name: str) -> TextFeatures:
    """Return the features of a model by name, loaded once in a process.

    Raises:
        BackboneError: If it cannot be loaded.
    """
    return TextFeatures(load_backbone(name))
