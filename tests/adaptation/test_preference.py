"""The packed preference loss against an unpacked one that runs one forward per answer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from support.merge_modules import give_rows
from support.merged_models import answer_log_probs
from support.tiny_models import random_backbone
from umim_core.adaptation.choices import EncodedQuestion
from umim_core.adaptation.preference import ending_scores, preference_loss
from umim_core.backbone.backbone import Backbone
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

VOCAB, SIZE = 31, 16
RULES = [(1, 2), (3, 4, 5), (6, 7, 8, 9)]


def tiny(kind: str) -> Backbone:
    return random_backbone(kind, torch.float64, vocab_size=VOCAB, initializer_range=0.02)


def fresh_module(seed: int) -> MergeModule:
    module = MergeModule(SIZE).double()
    module.initialise(1.0, torch.Generator().manual_seed(seed))
    return module


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


QUESTIONS = [
    EncodedQuestion(ids(1, 2, 3, 4, 5, 6), (ids(7, 8, 9), ids(10), ids(2, 3), ids(11, 12)), 2),
    EncodedQuestion(ids(20, 6, 7, 8, 9, 1), (ids(2, 1, 2), ids(13, 14)), 0),
    EncodedQuestion(ids(21), (ids(1, 2, 3), ids(4), ids(5, 6)), 1),
]
MATCHER = Matcher(RuleSet.from_spans(RULES))


def oracle_loss(
    backbone: Backbone, policy: MergeModule, reference: MergeModule, beta: float
) -> torch.Tensor:
    """The paper's listing, with loops."""
    per_question = []
    for question in QUESTIONS:

        def gain(ending: np.ndarray, question: EncodedQuestion = question) -> torch.Tensor:
            mine, fixed = (
                answer_log_probs(MergedModel(backbone, module, MATCHER), question.context, ending)
                for module in (policy, reference)
            )
            return mine.mean() - fixed.mean().detach()

        positive = gain(question.endings[question.gold])
        pairs = [
            -torch.log(torch.sigmoid(beta * (positive - gain(ending))))
            for k, ending in enumerate(question.endings)
            if k != question.gold
        ]
        per_question.append(sum(pairs) / len(pairs))
    return sum(per_question) / len(per_question)


def packed_loss(
    backbone: Backbone, policy: MergeModule, reference: MergeModule, beta: float
) -> torch.Tensor:
    with torch.no_grad():
        fixed = ending_scores(QUESTIONS, MergedModel(backbone, reference, MATCHER))
    scores = ending_scores(QUESTIONS, MergedModel(backbone, policy, MATCHER))
    return preference_loss(scores, fixed, [q.gold for q in QUESTIONS], beta=beta)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_packed_loss_and_gradient_equal_the_unpacked_ones(kind: str) -> None:
    backbone, reference = tiny(kind), fresh_module(2)
    losses, gradients = [], []
    for loss_of in (packed_loss, oracle_loss):
        policy = give_rows(fresh_module(1), RULES[:1])
        loss = loss_of(backbone, policy, reference, 3.0)
        loss.backward()
        fixed = (*backbone.model.parameters(), *reference.parameters())
        assert all(parameter.grad is None for parameter in fixed)
        losses.append(loss.item())
        gradients.append([p.grad.to_dense() for p in policy.parameters()])
    # Llama's RMSNorm computes in float32 whatever the weights are.
    assert losses[0] == pytest.approx(losses[1], abs=1e-7)
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-5)
        assert found.abs().max() > 0


def test_the_loss_of_equal_and_of_extreme_scores() -> None:
    backbone, module = tiny("gpt2"), fresh_module(1)
    assert packed_loss(backbone, module, module, 0.1).item() == pytest.approx(
        math.log(2), abs=1e-12
    )
    scores = torch.tensor([-1e4, 1e4], requires_grad=True)
    loss = preference_loss([scores], [torch.zeros(2)], [0], beta=1.0)
    loss.backward()
    assert loss.item() == pytest.approx(2e4)
    assert torch.isfinite(scores.grad).all()
