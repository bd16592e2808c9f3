"""Reference scores of the preference objective: one list per split, whatever objects hold it."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from umim_core.adaptation.choices import EncodedQuestion
from umim_core.backbone.backbone import Backbone
from umim_core.distill.objectives import PreferenceObjective
from umim_core.merging.compressed import Compressed
from umim_core.merging.module import MergeModule
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet


def questions(count: int, seed: int) -> list[EncodedQuestion]:
    rng = np.random.default_rng(seed)
    return [
        EncodedQuestion(
            np.concatenate([[1, 2], rng.integers(3, 30, 5)]),
            tuple(rng.integers(3, 30, 2 + choice) for choice in range(3)),
            index % 3,
        )
        for index in range(count)
    ]


@pytest.fixture
def objective(tiny_llama: Backbone, tmp_path: Path) -> PreferenceObjective:
    """Two training and three validation questions, all of them different."""
    module = MergeModule(tiny_llama.hidden_size)
    module.initialise(tiny_llama.embedding_std, torch.Generator().manual_seed(0))
    matcher = Matcher(RuleSet.from_spans([(1, 2)]))
    splits = (questions(2, seed=1), questions(3, seed=2))
    model = Compressed(tiny_llama, module, matcher, "compact")
    kept = tmp_path / "reference"
    return PreferenceObjective(module, model, *splits, beta=1.0, batch_size=2, reference=kept)


def test_each_split_is_compared_with_its_own_reference(objective: PreferenceObjective) -> None:
    weight, loss, _ = objective.validation_sums(0, 1, limit=8)
    assert loss / weight == pytest.approx(math.log(2), abs=1e-6)  # policy and reference are one
    assert objective([0, 1]).total.item() / 2 == pytest.approx(math.log(2), abs=1e-6)


def test_a_copy_keeps_the_reference_of_its_splits(objective: PreferenceObjective) -> None:
    assert isinstance(objective.module, MergeModule)
    with torch.no_grad():
        objective.module.query.add_(1.0)  # or every reference would give the same loss
    copied = copy.deepcopy(objective)  # its questions are new objects at other addresses
    assert copied.validation_sums(0, 1, 8) == objective.validation_sums(0, 1, 8)
    assert torch.equal(copied([1, 0]).total, objective([1, 0]).total)
