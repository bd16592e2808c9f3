"""Disks that refuse: a file system of any size, and the k-th write, flush or rename that fails."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pyarrow.parquet as pq
import pytest

PAGE = 4096


def published(root: Path) -> list[Path]:
    found = [path for path in root.glob("*/*") if re.fullmatch("[0-9a-f]{64}", path.name)]
    return found + list(root.glob("rules"))


def leftovers(root: Path) -> list[str]:
    """Return what is there besides artifacts: locks, drafts, states."""
    paths = {path.relative_to(root).as_posix() for path in root.rglob("*")}
    return [name for name in paths if re.search(r"\.(lock|partial|state|tmp|torn)", name)]


@contextmanager
def small_file_system(folder: Path) -> Iterator[Callable[[int], Path]]:
    """Give a function that makes a file system of a size in bytes, or resizes it."""
    place = folder / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={PAGE}", "tmpfs", str(place)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a tmpfs cannot be mounted here: {error}")

    def resize(size: int) -> Path:
        option = f"remount,size={size}"
        subprocess.run(["mount", "-o", option, str(place)], check=True, capture_output=True)
        return place

    try:
        yield resize
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


class Faults:
    """Let the k-th write, flush or rename of this process fail."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.fail_at = 0
        for name in ("fsync", "rename", "replace", "pwrite"):
            patch.setattr(os, name, self._counted(name, getattr(os, name)))
        patch.setattr(pq, "write_table", self._counted("write", pq.write_table))
        self._open = Path.open
        patch.setattr(Path, "open", lambda path, *args, **rest: self._stream(path, *args, **rest))

    def arm(self, fail_at: int) -> None:
        """Fail at a call, counted from 1."""
        self.calls, self.fail_at = [], fail_at

    @property
    def fired(self) -> str | None:
        return self.calls[self.fail_at - 1] if 0 < self.fail_at <= len(self.calls) else None

    def _counted(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object, **rest: object) -> object:
            self.calls.append(name)
            if len(self.calls) == self.fail_at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return call(*args, **rest)

        return counted

    def _stream(self, path: Path, mode: str = "r", *args: object, **rest: object) -> IO[bytes]:
        stream = self._open(path, mode, *args, **rest)
        return _Writer(stream, self._counted("write", stream.write)) if "w" in mode else stream


class _Writer:
    def __init__(self, stream: IO[bytes], write: Callable[..., object]) -> None:
        self._stream, self.write = stream, write
        self.flush, self.fileno = stream.flush, stream.fileno

    def writelines(self, parts: Iterable[bytes | memoryview]) -> None:
        for part in parts:
            self.write(part)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
