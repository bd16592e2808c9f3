"""Order of writes to disk: a power cut must not leave a name without its bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.run.stage import StageSpec, run_stage
from umim_core.store.disk import write_bytes
from umim_core.store.publication import publish_directory


class Disk:
    """Notes which files and folders were flushed, and refuses final names to any other.

    Attributes:
        renamed: Names that were given so far.
        flushed_after: Folders that were flushed once a name in them was given.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.renamed: list[str] = []
        self.flushed_after: list[str] = []
        self._flushed: set[int] = set()
        fsync = os.fsync

        def flush(handle: int) -> None:
            fsync(handle)
            self._flushed.add(os.fstat(handle).st_ino)
            if self.renamed:
                self.flushed_after.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)

        monkeypatch.setattr(os, "fsync", flush)
        for name in ("rename", "replace"):
            monkeypatch.setattr(Path, name, self._checked(getattr(Path, name)))

    def _checked(self, give: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def checked(path: Path, target: Path) -> Path:
            within = [path, *path.rglob("*")] if path.is_dir() else [path]
            lost = [file.name for file in within if file.stat().st_ino not in self._flushed]
            assert not lost, f"{target.name} would be there after a power cut, {lost} would not"
            self.renamed.append(target.name)
            return give(path, target)

        return checked


def fill(out: Path) -> None:
    (out / "folder").mkdir()
    (out / "folder" / "data").write_text("1")


def test_a_file_is_flushed_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    write_bytes(tmp_path / "x", b"1")
    assert disk.renamed == ["x"]


def test_a_published_directory_is_flushed_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    publish_directory(tmp_path / "x", fill)
    assert (disk.renamed, disk.flushed_after) == (["x"], [tmp_path.name])


@pytest.mark.parametrize("resumable", [False, True])
def test_a_stage_is_flushed_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumable: bool
) -> None:
    spec = StageSpec("stage", 1, {}, {}, resumable=resumable)
    disk = Disk(monkeypatch)

    def build(out: Path) -> dict[str, float]:
        fill(out)
        return {}

    run_stage(tmp_path, spec, build)
    assert disk.renamed[-1] == spec.key
    assert "stage" in disk.flushed_after, "the folder that the name is in"
