"""Controls of task adaptation for tests: scores, and weights that are no start."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from support.tiny_training import questions
from umim_core.merging.merged_model import MergedModel
from umim_core.training.objectives import ending_scores

KINDS = ("input-adapter", "lora")
QUESTIONS = questions(4, seed=3)


def scores(merged_model: MergedModel) -> Tensor:
    """Return the scores [4, 3] of the answers to four questions."""
    with torch.no_grad():
        return torch.stack(ending_scores(QUESTIONS, merged_model))


def disturb(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
