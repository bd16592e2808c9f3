"""Controls: the base at the start, as large as a merge module, trained, written and loaded."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.tiny_models import random_backbone
from support.tiny_training import QUESTIONS, disturb, scores
from umim_core.adaptation.control import (
    CONTROLS,
    KIND,
    SCHEMA,
    fresh_control,
    load_control,
    read_record,
    write_control,
)
from umim_core.backbone.backbone import Backbone
from umim_core.backbone.model_identity import model_identity
from umim_core.backbone.trials import check_capabilities
from umim_core.errors import ArtifactError, CheckpointError, ConfigError, MissingExtraError
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.store.artifacts import write_manifest
from umim_core.store.publication import publish_directory
from umim_core.training.objectives import ending_scores


@pytest.mark.parametrize("kind", CONTROLS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt-neo", "qwen3", "opt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_control_starts_as_the_base_model(kind: str, family: str, dtype: torch.dtype) -> None:
    backbone = random_backbone(family, dtype)
    control = fresh_control(kind, backbone, seed=5)
    base = scores(MergedModel.without_merging(backbone))
    assert torch.equal(scores(control.merged_model), base)
    disturb(control.module)
    assert not torch.allclose(scores(control.merged_model), base, atol=1e-3)


@pytest.mark.parametrize(("family", "size"), [("llama", 64), ("gpt2", 64), ("llama", 16)])
def test_controls_have_the_size_of_the_merge_module(family: str, size: int) -> None:
    backbone = random_backbone(family, hidden_size=size)
    merging = sum(parameter.numel() for parameter in MergeModule(size).parameters())
    assert fresh_control("input-adapter", backbone, seed=5).size == merging
    lora = fresh_control("lora", backbone, seed=5)
    outputs = {"llama": size + size // 2, "gpt2": 3 * size}[family]  # of queries and values
    per_rank = 2 * ({"llama": 2, "gpt2": 1}[family] * size + outputs)  # of both layers
    assert lora.size % per_rank == 0  # and the rank is the nearest
    assert abs(lora.size - merging) <= per_rank / 2 or lora.size == per_rank


@pytest.mark.parametrize("kind", CONTROLS)
def test_a_trained_control_is_a_whole_backbone_and_leaves_the_base_alone(
    kind: str, tiny_backbone: Backbone
) -> None:
    control = fresh_control(kind, tiny_backbone, seed=5)
    base, model = MergedModel.without_merging(tiny_backbone), control.merged_model.backbone.model
    before, trained = scores(base), {id(weight) for weight in control.module.parameters()}
    assert {id(weight) for weight in model.parameters() if weight.requires_grad} == trained
    disturb(control.module)
    total = torch.stack(ending_scores(QUESTIONS, control.merged_model)).sum()
    torch.autograd.backward(total)
    assert all(bool(weight.grad.any()) for weight in control.module.parameters())
    assert all(weight.grad is None for weight in model.parameters() if id(weight) not in trained)
    check_capabilities(control.merged_model.backbone)  # its forward, parts and cache agree
    assert torch.equal(scores(base), before)
    for backbone in (tiny_backbone, control.merged_model.backbone):
        assert backbone.fingerprint == model_identity(tiny_backbone.model).fingerprint
    assert tiny_backbone.embedding is tiny_backbone.model.get_input_embeddings()


def test_lora_names_what_it_needs(tiny_llama: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="family that peft has projections for"):
        fresh_control("lora", random_backbone("olmo2"), seed=0)
    monkeypatch.setitem(sys.modules, "peft", None)  # as where it is not installed
    with pytest.raises(MissingExtraError, match=r"pip install 'umim\[pipeline\]'"):
        fresh_control("lora", tiny_llama, seed=0)


def save(kind: str, backbone: Backbone, directory: Path) -> MergedModel:
    """Write a control that is no start; return the model that reads through it."""
    control = fresh_control(kind, backbone, seed=5)
    disturb(control.module)
    publish_directory(directory, partial(write_control, control, {"steps": 3, "best_score": -0.5}))
    return control.merged_model


@pytest.mark.parametrize("kind", CONTROLS)
def test_a_loaded_control_scores_as_the_saved_one(
    kind: str, tiny_backbone: Backbone, tmp_path: Path
) -> None:
    base = scores(MergedModel.without_merging(tiny_backbone))
    saved = scores(save(kind, tiny_backbone, tmp_path / "control"))
    loaded = load_control(tmp_path / "control", tiny_backbone)
    assert torch.equal(scores(loaded), saved)
    assert not torch.allclose(saved, base, atol=1e-3)
    assert torch.equal(scores(MergedModel.without_merging(tiny_backbone)), base)
    assert not any(x.requires_grad for x in loaded.backbone.model.parameters())
    record = read_record(tmp_path / "control")
    assert record.kind == kind
    assert record.size == fresh_control(kind, tiny_backbone, seed=0).size
    assert record.training == {"steps": 3, "best_score": -0.5}


def test_a_damaged_directory_is_refused(tiny_llama: Backbone, tmp_path: Path) -> None:
    save("input-adapter", tiny_llama, tmp_path / "control")
    path = tmp_path / "control" / "model.safetensors"
    save_file(load_file(path) | {"scale": torch.ones(3)}, path)
    with pytest.raises(ArtifactError):
        load_control(path.parent, tiny_llama)
    write_manifest(path.parent, kind=KIND, schema=SCHEMA, body={})  # that fits
    with pytest.raises(CheckpointError, match="must hold the tensors"):
        load_control(path.parent, tiny_llama)
