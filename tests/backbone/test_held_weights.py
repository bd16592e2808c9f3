"""Weights held in bfloat16: the bits of autocast's own casts; the backbone stays as it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from support.merged_models import fresh_model
from support.tiny_models import FAMILIES, random_backbone
from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.backbone.model_identity import model_identity
from umim_core.backbone.split import with_held_weights
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.training.packed_trunk import PackedTrunk
from umim_core.training.step import DistillModel

VOCAB = 19


def build(family: str) -> Backbone:
    return random_backbone(family, torch.float32, vocab_size=VOCAB, max_position_embeddings=32)


def step(backbone: Backbone) -> DistillModel:
    return DistillModel(fresh_model(backbone, [], 0.2, 1), autocast=True)


def loss_and_gradients(model: DistillModel) -> list[Tensor]:
    rows = [np.arange(9) % VOCAB, (np.arange(6) * 5) % VOCAB]
    cuts = [
        (np.array([0, 1, 3, 7, 8]), np.array([1, 2, 4, 1, 1])),
        (np.array([0, 3, 4]), np.array([3, 1, 2])),
    ]
    loss = model(rows, cuts).total
    return [loss.detach(), *torch.autograd.grad(loss, list(model.module.parameters()))]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_has_the_bits_of_casts_made_for_every_product(family: str) -> None:
    backbone = build(family)
    held, cast = step(backbone), step(backbone)
    cast._trunk = PackedTrunk(backbone)
    assert torch.bfloat16 in {w.dtype for w in held._trunk._backbone.trunk.parameters()}
    for found, expected in zip(loss_and_gradients(held), loss_and_gradients(cast), strict=True):
        assert torch.equal(found, expected)


def test_training_leaves_weights_identity_and_what_is_saved_as_they_were(tmp_path: Path) -> None:
    backbone = build("llama")
    before = {name: value.clone() for name, value in backbone.model.state_dict().items()}
    model = step(backbone)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = loss_and_gradients(model)[1:]
    for value, parameter in zip(gradients, model.module.parameters(), strict=True):
        parameter.grad = value
    optimizer.step()
    assert set(model.state_dict()) == {f"module.{name}" for name in model.module.state_dict()}
    after = backbone.model.state_dict()
    assert all(after[name].dtype is torch.float32 for name in before)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert model_identity(backbone.model) == backbone.identity
    matcher = Matcher(RuleSet.from_spans([(1, 2)]))
    Checkpoint.of(MergedModel(backbone, model.module, matcher)).write(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.float32}


def test_the_rest_of_the_weights_is_shared() -> None:
    backbone = build("llama")
    assert DistillModel(fresh_model(backbone, []))._trunk._backbone is backbone  # no autocast
    twin = with_held_weights(backbone)
    assert twin.identity is backbone.identity
    own, held = (dict(part.model.named_parameters()) for part in (backbone, twin))
    copied = {name for name, value in held.items() if value.data_ptr() != own[name].data_ptr()}
    assert copied == {name for name in own if name.endswith("proj.weight")}
    assert all(
        held[name].dtype is torch.bfloat16 and not held[name].requires_grad for name in copied
    )


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner


class WithoutAutocast(Wrapped):
    """A layer whose product is in float32 even under autocast."""

    def forward(self, states: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            out: Tensor = self.inner(states.float())
        return out


class ReadsWeights(Wrapped):
    """A layer that uses more digits of its weights than products under autocast do."""

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.inner(states) * self.inner.weight.sum()
        return out


@pytest.mark.parametrize("layer", [WithoutAutocast, ReadsWeights])
def test_a_backbone_that_needs_its_weights_whole_keeps_them(layer: type[nn.Module]) -> None:
    model = build("llama").model
    block = model.model.layers[0].mlp
    block.down_proj = layer(block.down_proj)
    backbone = wrap_backbone(model, None)
    assert with_held_weights(backbone) is backbone
