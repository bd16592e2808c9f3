"""Directories of controls: equal scores after loading, and what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from support.tiny_models import random_model, tiny_config
from support.trained_controls import KINDS, disturb, scores
from umim_core.adaptation.control import (
    KIND,
    SCHEMA,
    fresh_control,
    load_control,
    read_record,
    write_control,
)
from umim_core.backbone.backbone import Backbone, wrap_backbone
from umim_core.errors import (
    ArtifactError,
    BackboneMismatchError,
    CheckpointError,
    TokenizerMismatchError,
)
from umim_core.merging.merged_model import MergedModel
from umim_core.store.artifacts import write_manifest
from umim_core.store.publication import publish_directory


def save(kind: str, backbone: Backbone, directory: Path) -> MergedModel:
    """Write a control that is no start; return the model that reads through it."""
    control = fresh_control(kind, backbone, seed=5)
    disturb(control.module)
    publish_directory(directory, partial(write_control, control, {"steps": 3, "best_score": -0.5}))
    return control.merged_model


def sign(directory: Path) -> None:
    """Write a manifest that fits whatever the directory holds now."""
    write_manifest(directory, kind=KIND, schema=SCHEMA, body={})


@pytest.mark.parametrize("kind", KINDS)
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


def test_the_record_says_what_was_trained(tiny_llama: Backbone, tmp_path: Path) -> None:
    save("lora", tiny_llama, tmp_path / "control")
    record = read_record(tmp_path / "control")
    assert (record.kind, record.backbone) == ("lora", "tiny-llama")
    assert record.size == fresh_control("lora", tiny_llama, seed=0).size
    assert record.backbone_fingerprint == tiny_llama.fingerprint
    assert record.training == {"steps": 3, "best_score": -0.5}


def test_another_backbone_or_tokenizer_is_refused(
    tiny_llama: Backbone, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    save("input-adapter", tiny_llama, tmp_path / "control")
    for family, seed, difference in [("llama", 1, "the weights"), ("gpt2", 0, "model_type")]:
        other = wrap_backbone(random_model(tiny_config(family), seed), tiny_tokenizer)
        with pytest.raises(BackboneMismatchError, match=f"tiny-llama .*{difference}"):
            load_control(tmp_path / "control", other)
    with pytest.raises(TokenizerMismatchError, match="tiny-llama must have the tokenizer"):
        load_control(tmp_path / "control", wrap_backbone(tiny_llama.model, None))


def test_a_damaged_directory_is_refused(tiny_llama: Backbone, tmp_path: Path) -> None:
    save("input-adapter", tiny_llama, tmp_path / "control")
    path = tmp_path / "control" / "model.safetensors"
    weights = load_file(path)
    for changed, message in (
        (weights | {"scale": torch.ones(3)}, "must hold the tensors"),
        ({name: x for name, x in weights.items() if name != "scale"}, "must hold the tensors"),
        (weights | {"scale": weights["scale"] * torch.nan}, "must hold finite weights"),
    ):
        save_file(changed, path)
        with pytest.raises(ArtifactError):
            load_control(path.parent, tiny_llama)
        sign(path.parent)
        with pytest.raises(CheckpointError, match=message):
            load_control(path.parent, tiny_llama)
    (path.parent / "manifest.json").unlink()
    with pytest.raises(ArtifactError):
        load_control(path.parent, tiny_llama)
