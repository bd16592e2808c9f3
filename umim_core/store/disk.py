"""Durable writes: atomic files, flushed folders, refusals of the disk by name."""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

from umim_core.errors import ArtifactError, ClusterError

_REFUSALS: Final = frozenset(
    {
        errno.EACCES,
        errno.EDQUOT,
        errno.EEXIST,
        errno.EFBIG,
        errno.EIO,
        errno.ENAMETOOLONG,
        errno.ENOSPC,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    }
)
_MARK_BITS: Final = 62  # an int64 that is never negative


def user_cache() -> Path:
    """Return the user's folder for what can be made again: ``$XDG_CACHE_HOME/umim``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "umim"


def write_bytes(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data`` atomically and flush it to disk."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise unwritable(path, len(data), error) from error


def unwritable(path: Path, size: int, error: OSError) -> ArtifactError:
    """Return the error for a write of ``size`` bytes that the disk refused."""
    return ArtifactError(
        f"{path} ({size} bytes) must be writable",
        error.strerror or str(error),
        "Free space or choose another root.",
    )


def check_writable(place: Path) -> None:
    """Refuse a place that cannot be written, before work whose result belongs there.

    Tried in the folder, or in the nearest one above that exists; nothing stays.
    """
    try:
        there = next(path for path in (place, *place.absolute().parents) if path.exists())
        with TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise unwritable(place, 0, error) from error


def flush_tree(directory: Path) -> None:
    """Flush every file and folder below ``directory`` to disk."""
    for path in [*directory.rglob("*"), directory]:
        flush(path)


def flush(path: Path) -> None:
    """Flush one file or folder to disk (a folder: the names in it)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_refusal(error: OSError) -> bool:
    """Return whether the disk refused a write, as opposed to an input that is missing."""
    return error.errno in _REFUSALS


def leave_mark(folder: Path) -> int:
    """Put a mark into a folder, in place of any older one, and return its number.

    The number is random and part of the name: no cache of a file system can know it.
    """
    mark = secrets.randbits(_MARK_BITS)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_marks(folder)
        _mark_path(folder, mark).touch()
    except OSError as error:
        raise ArtifactError(
            f"{folder} (nothing written) must be writable",
            error.strerror or str(error),
            "Free space or choose another artifact root.",
        ) from error
    return mark


def sees_mark(folder: Path, mark: int) -> bool:
    """Tell whether a folder is the one in which the mark was left."""
    return _mark_path(folder, mark).is_file()


def remove_marks(folder: Path) -> None:
    """Take all marks out of a folder."""
    for path in folder.glob("mark-*"):
        path.unlink()


def _mark_path(folder: Path, mark: int) -> Path:
    return folder / f"mark-{mark:016x}"


def not_shared(folder: Path, where: str) -> ClusterError:
    """Return the error of workers, "ranks [1]" say, that do not see a folder of the root."""
    return ClusterError(
        "workers must share the artifact root",
        f"{folder}, which is another folder on {where}",
        "Set UMIM_ROOT (UMIM_SCRATCH where that is an address) to a place that every node mounts.",
    )
