"""Reference scores of the preference objective: one list per split, whatever objects hold it."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.merged_models import fresh_model
from support.tiny_training import questions
from support.trained_controls import KINDS, disturb
from umim_core.adaptation.choices import EncodedQuestion
from umim_core.adaptation.control import fresh_control
from umim_core.adaptation.preference import ending_scores
from umim_core.backbone.backbone import Backbone
from umim_core.merging.forms.rule_rows import RuleRows, frequent_spans
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.training import objectives, reference_scores
from umim_core.training.objectives import PreferenceObjective


def objective_of(
    backbone: Backbone, folder: Path, train: list[EncodedQuestion], micro_batch: int | None
) -> PreferenceObjective:
    """A merge module with rows of its own for a rule, whose weights are not those of the start."""
    model = fresh_model(backbone, [(1, 2), (3, 4)])
    module, rules = model.require_module(), model.require_matcher().rules
    module.rows = RuleRows(frequent_spans(rules, 1), backbone.hidden_size)
    found = PreferenceObjective(
        module,
        model,
        train,
        questions(3, seed=2),
        beta=5.0,
        batch_size=len(train),
        reference=folder,
        micro_batch=micro_batch,
    )
    disturb(module)
    return found


def step(objective: PreferenceObjective, indices: list[int]) -> tuple[float, dict[str, Tensor]]:
    """Return the loss sum and its gradient by every weight, dense."""
    objective.zero_grad(set_to_none=True)
    total = objective(indices).total
    (total * 0.5).backward()
    found = {name: value.grad for name, value in objective.module.named_parameters()}
    assert all(value is not None for value in found.values())
    return total.item(), {name: value.to_dense() for name, value in found.items()}


def seven() -> list[EncodedQuestion]:
    """Seven questions of which one has no merge."""
    found = questions(7, seed=1)
    found[4] = replace(found[4], context=found[4].context[:5])
    return found


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 7, 100])
def test_micro_batches_change_neither_loss_nor_gradient(
    tiny_backbone: Backbone, tmp_path: Path, micro_batch: int
) -> None:
    indices = [6, 0, 4, 2, 1, 3, 5]
    loss, wanted = step(objective_of(tiny_backbone, tmp_path / "all", seven(), None), indices)
    parts = objective_of(tiny_backbone, tmp_path / "parts", seven(), micro_batch)
    found, gradients = step(parts, indices)
    assert abs(loss / 7 - math.log(2)) > 1e-2
    assert found == pytest.approx(loss, rel=1e-6)
    for name, value in wanted.items():
        assert float(value.abs().max()) > 1e-4, name
        torch.testing.assert_close(gradients[name], value, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_of_a_control_change_neither(
    tiny_backbone: Backbone, tmp_path: Path, kind: str
) -> None:
    results = []
    for micro_batch in (None, 2):
        control = fresh_control(kind, tiny_backbone, seed=5)
        objective = PreferenceObjective(
            control.module,
            control.merged_model,
            questions(5, seed=1),
            questions(3, seed=2),
            beta=5.0,
            batch_size=5,
            reference=tmp_path / str(micro_batch),
            micro_batch=micro_batch,
        )
        disturb(control.module)
        results.append(step(objective, [0, 1, 2, 3, 4]))
    (loss, wanted), (found, gradients) = results
    assert found == pytest.approx(loss, abs=1e-5)
    for name, value in wanted.items():
        torch.testing.assert_close(gradients[name], value, atol=1e-6, rtol=1e-5, msg=name)


def test_no_more_questions_than_a_micro_batch_are_scored_at_once(
    tiny_llama: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def counted(asked: Sequence[EncodedQuestion], merged_model: MergedModel) -> list[Tensor]:
        sizes.append(len(asked))
        return ending_scores(asked, merged_model)

    monkeypatch.setattr(objectives, "ending_scores", counted)
    monkeypatch.setattr(reference_scores, "ending_scores", counted)
    objective = objective_of(tiny_llama, tmp_path / "parts", seven(), 2)
    assert sizes == [2] * 5  # of both splits, for the reference
    objective(list(range(7))).total.backward()
    assert sizes[5:] == [2, 2, 2, 1]
    objective.validation_sums(0, 1, limit=8)
    assert sizes[9:] == [2, 1]


@pytest.fixture
def objective(tiny_llama: Backbone, tmp_path: Path) -> PreferenceObjective:
    """Two training and three validation questions, all of them different."""
    splits = (questions(2, seed=1), questions(3, seed=2))
    model, kept = fresh_model(tiny_llama, [(1, 2)]), tmp_path / "reference"
    module = model.require_module()
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
