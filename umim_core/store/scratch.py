"""Scratch: what is written beside its final place until it is whole.

::

    .NAME.<16 hex digits>.umim/     nobody can guess the name, and nobody else can enter
        lock                        our mark; its maker holds an ``flock`` on it while it lives
        whole                       a file or folder, to be renamed

A folder of that name with our mark, whose maker is gone, is what a killed process left: the next
one that writes NAME removes it. Nothing else is ever removed.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_NAME: Final = re.compile(r"\.(.+)\.[0-9a-f]{16}\.umim", re.DOTALL)
_STEM_BYTES: Final = 200  # of a name; file systems take 255
_LOCK: Final = "lock"
_MARK: Final = b"scratch of umim\n"


@contextmanager
def scratch(parent: Path, stem: str) -> Iterator[Path]:
    """Give a private place on the disk of ``parent``, where nothing is yet; rename what to keep."""
    sweep(parent, stem)
    handle = None
    while handle is None:
        folder = parent / f".{_cut(stem)}.{secrets.token_hex(8)}.umim"
        handle = _made(folder)
    try:
        yield folder / "whole"
    finally:
        remove_marked(folder, _LOCK)
        os.close(handle)


@contextmanager
def scratch_folder(parent: Path, stem: str) -> Iterator[Path]:
    """Give a new folder in a place of ``scratch``."""
    with scratch(parent, stem) as folder:
        folder.mkdir()
        yield folder


def sweep(parent: Path, stem: str | None) -> None:
    """Remove what killed processes of this user left in a folder, for one name or for all."""
    with suppress(OSError), os.scandir(parent) as entries:
        for name in [entry.name for entry in entries if entry.name.endswith(".umim")]:
            found = _NAME.fullmatch(name)
            if found and (stem is None or found[1] == _cut(stem)):
                _remove(parent / name)


def remove_marked(folder: Path, mark: str) -> None:
    """Remove a folder of ours, its mark last: what a kill leaves of it is still ours."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != mark:
                path.unlink()
        (folder / mark).unlink()
        folder.rmdir()


def _made(folder: Path) -> int | None:
    """Make a folder and lock it; None if a sweep took it for a dead one in between."""
    folder.mkdir(mode=0o700)
    try:
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    with suppress(OSError):  # a file system without locks: nothing is swept there either
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        os.write(handle, _MARK)
    except OSError:  # a full disk
        os.close(handle)
        remove_marked(folder, _LOCK)
        raise
    return handle


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        return
    with suppress(OSError):
        folder.rmdir()  # of a maker that did not come to its lock: only if it is empty
    try:
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        status = os.fstat(handle)
        if (
            stat.S_ISREG(status.st_mode)
            and status.st_nlink == 1
            and status.st_uid == os.geteuid()
            and os.pread(handle, len(_MARK) + 1, 0) == _MARK
        ):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_marked(folder, _LOCK)
    except OSError:  # locked: its maker lives
        pass
    finally:
        os.close(handle)


def _cut(stem: str) -> str:
    return os.fsdecode(os.fsencode(stem)[:_STEM_BYTES])
