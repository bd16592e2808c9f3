"""Loading a backbone by name: safetensors only, the pinned revision, no code (reliability 42).

Refusals of pickled weights and of ``auto_map`` are in ``backbone/test_backbone.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from support.merged_models import fresh_model
from umim_core import UMIM
from umim_core.backbone.backbone import load_backbone
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.checkpoint.checkpoint_files import CHECKPOINT_SCHEMA
from umim_core.errors import BackboneError, BackboneMismatchError, CheckpointError
from umim_core.store.artifacts import write_manifest

NAME = "owner/name"
FIRST, SECOND = "a" * 40, "b" * 40


@pytest.fixture
def hub(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: Callable[[str, int], PreTrainedModel],
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> Path:
    """A hub's cache, offline: a repository whose main branch has moved on to other weights."""
    repository = tmp_path / "models--owner--name"
    for seed, commit in enumerate((FIRST, SECOND)):
        tiny_model("llama", seed).save_pretrained(repository / "snapshots" / commit)
        tiny_tokenizer.save_pretrained(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(SECOND)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return repository


def checkpoint_of(revision: str | None, folder: Path) -> Path:
    made = Checkpoint.of(fresh_model(load_backbone(NAME, revision=FIRST), [(1, 2)]))
    config = made.config.model_copy(update={"backbone_revision": revision})
    replace(made, config=config).save(folder / "merge")
    return folder / "merge"


def test_a_checkpoint_loads_the_revision_it_was_trained_with(hub: Path, tmp_path: Path) -> None:
    first, second = (load_backbone(NAME, revision=commit) for commit in (FIRST, SECOND))
    assert first.fingerprint != second.fingerprint == load_backbone(NAME).fingerprint
    umim = UMIM.from_pretrained(checkpoint_of(FIRST, tmp_path))
    assert umim.backbone.fingerprint == first.fingerprint


def test_a_branch_that_moved_on_is_refused(hub: Path, tmp_path: Path) -> None:
    with pytest.raises(BackboneMismatchError, match="owner/name"):
        UMIM.from_pretrained(checkpoint_of(None, tmp_path))


def test_a_revision_that_is_not_there_is_an_error_not_another_one(hub: Path) -> None:
    for load in (load_backbone, load_tokenizer):
        with pytest.raises(BackboneError, match="owner/name"):
            load(NAME, revision="c" * 40)


def test_a_merge_checkpoint_with_pickled_weights_is_refused(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    loaded = Checkpoint.load(tiny_checkpoint)
    folder = tmp_path / "merge"
    loaded.save(folder)
    torch.save(loaded.module.state_dict(), folder / "model.safetensors")
    (folder / "manifest.json").unlink()
    write_manifest(folder, kind="checkpoint", schema=CHECKPOINT_SCHEMA, body={})
    with pytest.raises(CheckpointError, match="safetensors"):
        Checkpoint.load(folder)
