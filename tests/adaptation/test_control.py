"""Controls: the base model at the start, as large as a merge module; the backbone stays."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path

import pytest
import torch

from support.tiny_models import random_backbone
from support.trained_controls import KINDS, disturb, scores, some_questions
from umim_core.adaptation.control import Control, fresh_control, merge_module_size
from umim_core.adaptation.preference import ending_scores
from umim_core.backbone.backbone import Backbone, check_capabilities
from umim_core.backbone.model_identity import model_identity
from umim_core.config.recipe import PreferenceConfig
from umim_core.errors import ConfigError, MissingExtraError
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.training.objectives import PreferenceObjective
from umim_core.training.optimizer import AdamWStrategy


@pytest.fixture(params=KINDS)
def control(request: pytest.FixtureRequest, tiny_backbone: Backbone) -> Control:
    """Each control of each tiny backbone, untrained."""
    return fresh_control(request.param, tiny_backbone, seed=5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt-neo", "qwen3", "opt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_control_starts_as_the_base_model(kind: str, family: str, dtype: torch.dtype) -> None:
    backbone = random_backbone(family, dtype)
    control = fresh_control(kind, backbone, seed=5)
    base = scores(MergedModel.without_merging(backbone))
    assert torch.equal(scores(control.merged_model), base)
    disturb(control.module)
    assert not torch.allclose(scores(control.merged_model), base, atol=1e-3)


def test_a_trained_control_is_a_whole_backbone_and_leaves_the_base_alone(
    control: Control, tiny_backbone: Backbone
) -> None:
    base = MergedModel.without_merging(tiny_backbone)
    before = scores(base)
    disturb(control.module)
    check_capabilities(
        control.merged_model.backbone
    )  # its own forward, its parts and its cache agree
    assert torch.equal(scores(base), before)
    assert model_identity(tiny_backbone.model).fingerprint == tiny_backbone.fingerprint
    assert control.merged_model.backbone.fingerprint == tiny_backbone.fingerprint
    assert tiny_backbone.embedding is tiny_backbone.model.get_input_embeddings()


@pytest.mark.parametrize("size", [16, 64])
def test_the_input_adapter_has_the_size_of_the_merge_module(size: int) -> None:
    control = fresh_control("input-adapter", random_backbone(hidden_size=size), seed=5)
    merging = sum(parameter.numel() for parameter in MergeModule(size).parameters())
    assert control.size == merge_module_size(size) == merging


@pytest.mark.parametrize(("family", "size"), [("llama", 64), ("gpt2", 64), ("llama", 16)])
def test_lora_has_the_rank_that_is_nearest_to_that_size(family: str, size: int) -> None:
    control = fresh_control("lora", random_backbone(family, hidden_size=size), seed=5)
    outputs = {"llama": size + size // 2, "gpt2": 3 * size}[family]  # of queries and values
    projections = {"llama": 2, "gpt2": 1}[family]
    per_rank = 2 * (projections * size + outputs)  # of both layers
    assert control.size % per_rank == 0
    assert abs(control.size - merge_module_size(size)) <= per_rank / 2 or control.size == per_rank


def test_only_the_control_is_trained(control: Control) -> None:
    model = control.merged_model.backbone.model
    trained = {id(parameter) for parameter in control.module.parameters()}
    wanting = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert wanting == trained
    disturb(control.module)
    total = torch.stack(ending_scores(some_questions(), control.merged_model)).sum()
    torch.autograd.backward(total)
    gradients = [parameter.grad for parameter in control.module.parameters()]
    assert all(gradient is not None and bool(gradient.any()) for gradient in gradients)
    assert all(x.grad is None for x in model.parameters() if id(x) not in trained)


def objective_of(control: Control, folder: Path) -> PreferenceObjective:
    given = (control.module, control.merged_model, some_questions(), some_questions())
    return PreferenceObjective(*given, beta=1.0, batch_size=4, reference=folder / "reference")


def test_preference_training_lowers_the_loss_and_changes_no_weight_of_the_backbone(
    control: Control, tiny_backbone: Backbone, tmp_path: Path
) -> None:
    config = PreferenceConfig(max_steps=8, batch_size=4, beta=1.0)
    strategy = AdamWStrategy(objective_of(control, tmp_path), config)
    losses = []
    for _ in range(8):
        loss = strategy.loss(range(4))
        losses.append(float(loss.total.detach()) / 4)
        strategy.update(loss.total / 4, 1e-2)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)  # its reference is its start
    assert losses[-1] < losses[0] - 0.02
    assert model_identity(tiny_backbone.model).weights_digest == (
        tiny_backbone.identity.weights_digest
    )


def test_a_copy_of_an_objective_trains_its_own_control(control: Control, tmp_path: Path) -> None:
    objective = objective_of(control, tmp_path)
    copied = copy.deepcopy(objective)
    disturb(copied.module)
    assert copied([0]).total.item() != pytest.approx(math.log(2), abs=1e-4)
    assert objective([0]).total.item() == pytest.approx(math.log(2), abs=1e-6)


def test_lora_names_what_it_needs(tiny_llama: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="family that peft has projections for"):
        fresh_control("lora", random_backbone("olmo2"), seed=0)
    monkeypatch.setitem(sys.modules, "peft", None)  # as where it is not installed
    with pytest.raises(MissingExtraError, match=r"pip install 'umim\[pipeline\]'"):
        fresh_control("lora", tiny_llama, seed=0)
