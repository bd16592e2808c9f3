"""Marks by which a process on another machine proves that it sees the same folder."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

from umim_core.errors import ArtifactError, ClusterError

_MARK_BITS: Final = 62  # an int64 that is never negative


def leave_mark(folder: Path) -> int:
    """Put a mark into a folder, in place of any older one, and return its number.

    The number is random and part of the name: no cache of a file system can know it.

    Raises:
        ArtifactError: If the folder cannot be made or written.
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
    """Return the error of workers that do not see a folder of the artifact root.

    Args:
        folder: The folder.
        where: The workers, as "ranks [1]".
    """
    return ClusterError(
        "workers must share the artifact root",
        f"{folder}, which is another folder on {where}",
        "Set UMIM_ROOT (UMIM_SCRATCH where that is an address) to a place that every node mounts.",
    )
