"""The preference (DPO) loss over answers that share one compressed context.

    s(x, y) = mean over t of log p(y_t | compressed x, y_<t)
    loss    = -log sigmoid(beta [(s - s_ref)(y+) - (s - s_ref)(y-)])

averaged over the wrong answers of a question, then over questions. Contexts and answers are packed
(see ``merging.continuations``): a question costs one row, not one per answer. At the start, where
the policy equals its reference, the loss is log 2 up to rounding: a question's scores differ in
their last bits where other questions share its batch. A step's true gain is small, so rounding must
be that of float32; in bfloat16 it is larger than the gain.

Source: paper, "RL Adaptation", equation task_rl_objective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from umim_core.adaptation.choices import EncodedQuestion
from umim_core.merging.continuations import score_continuations
from umim_core.merging.merged_model import MergedModel

DEFAULT_BETA: Final = 0.1  # paper, task-adaptation training configurations


def ending_scores(questions: Sequence[EncodedQuestion], merged_model: MergedModel) -> list[Tensor]:
    """Score every answer given its question's compressed context.

    Per question, it is the mean token log-probability of each answer [C] (nats per token). Call it
    under ``torch.no_grad()`` with the reference module once per question; the scores then serve
    every epoch.
    """
    scored = score_continuations(
        [question.context for question in questions],
        [question.endings for question in questions],
        merged_model,
    )
    return [torch.stack([score.log_probs.mean() for score in row]) for row in scored]


def preference_loss(
    scores: Sequence[Tensor],
    reference: Sequence[Tensor],
    golds: Sequence[int],
    *,
    beta: float = DEFAULT_BETA,
) -> Tensor:
    """Return the preference loss: mean over a question's wrong answers, then over questions.

    Scores of policy (with gradient) and frozen reference (without) are per question [C], ``golds``
    the indices of correct answers. ``beta``, above 0, pulls towards the reference.

    Example:
        Two answers, gold 0, s = (-1, -3), s_ref = (-1.5, -2.5), beta 1: the margin is
        0.5 - (-0.5) = 1 and the loss log(1 + e^-1) = 0.3133.
    """
    losses = []
    for policy, fixed, gold in zip(scores, reference, golds, strict=True):
        gain = policy - fixed.detach().to(policy)
        wrong = torch.arange(len(gain), device=gain.device) != gold
        losses.append(F.softplus(-beta * (gain[gold] - gain[wrong])).mean())
    return torch.stack(losses).mean()
