"""Controls of task adaptation for tests: questions, their scores, and weights that are no start."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from umim_core.adaptation.choices import EncodedQuestion
from umim_core.adaptation.preference import ending_scores
from umim_core.merging.merged_model import MergedModel

KINDS = ("input-adapter", "lora")


def some_questions(count: int = 4) -> list[EncodedQuestion]:
    """Return questions of three answers over the tiny vocabulary."""
    rng = np.random.default_rng(3)
    return [
        EncodedQuestion(
            rng.integers(1, 32, 7),
            tuple(rng.integers(1, 32, 2 + choice) for choice in range(3)),
            index % 3,
        )
        for index in range(count)
    ]


def scores(merged_model: MergedModel) -> Tensor:
    """Return the scores [4, 3] of the answers to four questions."""
    with torch.no_grad():
        return torch.stack(ending_scores(some_questions(), merged_model))


def disturb(module: nn.Module) -> None:
    """Give a control weights that are not those of the start."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
