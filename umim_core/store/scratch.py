"""Scratch: what is written beside its final place until it is whole.

A scratch file or folder is called ``.NAME.<16 hex digits>.umim``: nobody can guess the name, it is
made anew without following links, and its maker holds an ``flock`` as long as it lives. That name,
the file ``lock`` in a folder of it and our user id are the mark: what carries all of it, and has no
maker any more, is what a killed process left. Nothing else is ever removed.
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
_OPEN: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
LOCK: Final = "lock"


@contextmanager
def scratch_file(target: Path, mode: int) -> Iterator[tuple[int, Path]]:
    """Give a new file beside ``target``, open and locked; rename it to keep it."""
    sweep(target.parent, target.name)
    handle, path = -1, target
    while handle < 0:
        path = target.with_name(_new_name(target.name))
        handle = _made(path, mode)
    try:
        yield handle, path
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(handle)


@contextmanager
def scratch_folder(parent: Path, stem: str) -> Iterator[Path]:
    """Give a new folder ``whole`` in a private one of ``parent``; rename it to keep it."""
    sweep(parent, stem)
    handle, folder = -1, parent
    while handle < 0:
        folder = parent / _new_name(stem)
        folder.mkdir(mode=0o700)
        with suppress(FileNotFoundError):  # swept before it had its lock
            handle = _made(folder / LOCK, 0o600)
    try:
        (folder / "whole").mkdir()
        yield folder / "whole"
    finally:
        remove_marked(folder, LOCK)
        os.close(handle)


def sweep(folder: Path, stem: str) -> None:
    """Remove the scratch that killed processes of this user left for one name in a folder."""
    with suppress(OSError), os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.name.endswith(".umim")]
        for name in names:
            if (found := _NAME.fullmatch(name)) and found[1] == _cut(stem):
                _remove(folder / name)


def sweep_tree(folder: Path) -> None:
    """Remove all scratch of killed processes below a folder that is about to be published."""
    for path in list(folder.rglob(".*.umim")):
        if _NAME.fullmatch(path.name):
            _remove(path)


def remove_marked(folder: Path, mark: str) -> None:
    """Remove a folder of ours, its mark last: what a kill leaves of it is still ours."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.name == mark:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        (folder / mark).unlink(missing_ok=True)
        folder.rmdir()


def _remove(path: Path) -> None:
    """Remove scratch whose maker is gone; an empty folder's has not come to its lock."""
    is_folder = path.is_dir() and not path.is_symlink()
    handle = _claimed(path / LOCK if is_folder else path)
    if handle is None:
        if is_folder:
            with suppress(OSError):
                path.rmdir()  # only if it is empty
        return
    if is_folder:
        remove_marked(path, LOCK)
    else:
        path.unlink(missing_ok=True)
    os.close(handle)


def _made(path: Path, mode: int) -> int:
    """Make a file and lock it; -1 if a sweep took it for a dead one in between."""
    handle = os.open(path, _OPEN | os.O_CREAT | os.O_EXCL, mode)
    with suppress(OSError):  # a file system without locks: nothing is swept there either
        fcntl.flock(handle, fcntl.LOCK_EX)
    if os.fstat(handle).st_nlink:
        return handle
    os.close(handle)
    return -1


def _claimed(path: Path) -> int | None:
    """Lock a regular file of this user that nobody has locked."""
    try:
        handle = os.open(path, _OPEN)
    except OSError:
        return None
    try:
        if is_ours(os.fstat(handle)):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
    except OSError:
        pass
    os.close(handle)
    return None


def is_ours(status: os.stat_result) -> bool:
    """Return whether a file is a regular one of this user under one name."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_uid == os.geteuid()


def _new_name(stem: str) -> str:
    return f".{_cut(stem)}.{secrets.token_hex(8)}.umim"


def _cut(stem: str) -> str:
    return os.fsdecode(os.fsencode(stem)[:_STEM_BYTES])
