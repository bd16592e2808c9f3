"""Hashes of weights between loads: found again, never trusted when something changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from umim_core.backbone import model_identity as weight_cache
from umim_core.backbone.backbone import Backbone, load_backbone
from umim_core.errors import BackboneError


@pytest.fixture
def saved(tiny_llama: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A backbone that counts as large, with a cache of its own."""
    folder = tmp_path / "model"
    tiny_llama.model.save_pretrained(folder)
    tiny_llama.tokenizer.save_pretrained(folder)
    monkeypatch.setattr(weight_cache, "_SMALLEST", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Data types of the models whose weights were hashed."""
    counted: list[torch.dtype] = []
    lines = weight_cache.weight_lines

    def count(model: torch.nn.Module) -> tuple[str, ...]:
        counted.append(next(model.parameters()).dtype)
        return lines(model)

    monkeypatch.setattr(weight_cache, "weight_lines", count)
    return counted


def records(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache" / "umim" / "weights").iterdir())


def test_weights_are_hashed_once_whatever_the_data_type(
    saved: Path, hashed: list[torch.dtype], tmp_path: Path
) -> None:
    found = {
        load_backbone(str(saved), dtype=dtype).fingerprint
        for dtype in ("float16", "float32", "bfloat16")
    }
    assert len(found) == 1
    assert hashed == [torch.float32]  # as published: float16 would not hold the weights
    assert len(records(tmp_path)) == 1


def test_changed_weights_are_hashed_again(saved: Path, hashed: list[torch.dtype]) -> None:
    before = load_backbone(str(saved)).fingerprint
    path = saved / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"][0, 0] += 1.0
    save_file(weights, path, metadata={"format": "pt"})
    os.utime(path, ns=(1, 1))
    assert load_backbone(str(saved)).fingerprint != before
    assert len(hashed) == 2


@pytest.mark.parametrize("damage", ["", "[]", "{", '["x"]', "null"])
def test_a_damaged_record_is_as_good_as_none(
    saved: Path, hashed: list[torch.dtype], tmp_path: Path, damage: str
) -> None:
    before = load_backbone(str(saved)).fingerprint
    [record] = records(tmp_path)
    record.write_text(damage)
    assert load_backbone(str(saved)).fingerprint == before
    assert len(hashed) == 2
    assert load_backbone(str(saved)).fingerprint == before
    assert len(hashed) == 2


def test_files_that_lack_weights_are_refused(saved: Path) -> None:
    path = saved / "model.safetensors"
    weights = load_file(path)
    del weights["lm_head.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(BackboneError, match=r"must be complete; got .* lacks lm_head\.weight"):
        load_backbone(str(saved))
