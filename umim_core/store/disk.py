"""Durable writes: atomic files, flushed folders, refusals of the disk by name."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

from umim_core.errors import ArtifactError, ClusterError
from umim_core.store.scratch import scratch

_REFUSALS: Final = (
    errno.EACCES, errno.EBUSY, errno.EDQUOT, errno.EEXIST, errno.EFBIG, errno.EIO, errno.EISDIR,
    errno.ELOOP, errno.ENAMETOOLONG, errno.ENOSPC, errno.ENOTDIR, errno.ENOTEMPTY, errno.EPERM,
    errno.EROFS,
)  # fmt: skip
# A folder that is not ours, an owner that cannot be kept, a file mounted into its place.
_IRREPLACEABLE: Final = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.EROFS)
REMEDY: Final = "Free space or choose another directory."
_MOST_LINKS: Final = 40


def write_bytes(path: Path, *parts: bytes | memoryview, durable: bool = True) -> None:
    """Write a file whole or not at all, through links, and flush it to disk if ``durable``.

    A file that is there keeps its mode and owner. What cannot be replaced without harm is written
    into: what is no regular file (``/dev/stdout``, a FIFO), a file with several names, one whose
    owner cannot be kept, one in a folder that cannot be written.
    """
    try:
        with suppress(FileExistsError):  # no folder: said below, by its name
            path.parent.mkdir(parents=True, exist_ok=True)
        handle = _in_place(path)
        if handle is None:
            handle = _replaced(Path(os.path.realpath(path)), parts, durable)
        if handle is not None:
            with os.fdopen(handle, "wb") as stream:
                stream.writelines(parts)
    except OSError as error:
        size = sum(memoryview(part).nbytes for part in parts)
        raise unwritable(path, size, error) from error


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    write_bytes(path, "".join(lines).encode())


def _in_place(path: Path) -> int | None:
    """Open what must not be replaced; None for a new file and a regular one of one name."""
    link = path
    for _ in range(_MOST_LINKS):
        folder = os.path.realpath(link.parent)
        if folder == f"/proc/{os.getpid()}/fd":  # /dev/stdout and its like, at their place
            sys.stdout.flush()
            return os.dup(int(link.name))
        if not link.is_symlink():
            break
        link = Path(folder, os.readlink(link))
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:  # 0: replaced at this moment
        return None
    return os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOCTTY)


def _replaced(target: Path, parts: Iterable[bytes | memoryview], durable: bool) -> int | None:
    """Replace a file; return it opened for writing where that cannot be done."""
    before = target.stat() if target.exists() else None
    try:
        with scratch(target.parent, target.name) as place:
            with place.open("wb") as stream:
                stream.writelines(parts)
                stream.flush()
                if before:
                    now = os.fstat(stream.fileno())
                    if (now.st_uid, now.st_gid) != (before.st_uid, before.st_gid):
                        os.fchown(stream.fileno(), before.st_uid, before.st_gid)
                    os.fchmod(stream.fileno(), stat.S_IMODE(before.st_mode))
                if durable:
                    os.fsync(stream.fileno())
            place.replace(target)
    except OSError as error:
        if before is None or error.errno not in _IRREPLACEABLE:
            raise
        return os.open(target, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW)
    return None


def read_bytes(path: Path, most: int) -> bytes:
    """Return what a regular file holds; OSError for anything else, and for more than ``most``."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO does not block
    with os.fdopen(handle, "rb") as stream:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        data = stream.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"more than {most:,} bytes", str(path))
    return data


def unwritable(path: Path, size: int, error: OSError, remedy: str = REMEDY) -> ArtifactError:
    """Return the error for a write of ``size`` bytes that the disk refused."""
    rule = f"{path} ({size} bytes) must be writable"
    return ArtifactError(rule, error.strerror or str(error), remedy)


@contextmanager
def refusals_named(place: Path, remedy: str = REMEDY, folder: Path | None = None) -> Iterator[None]:
    """Raise a refused write within as an error of its file, else of the place.

    It tells the bytes that a folder, or the file of the place, holds by then.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSALS:  # an input that is missing, say
            raise
        files = [place] if folder is None else folder.rglob("*")
        size = 0
        with suppress(OSError):  # of what others remove meanwhile, or a name that is too long
            size = sum(path.stat().st_size for path in files if path.is_file())
        raise unwritable(Path(error.filename or place), size, error, remedy) from error


def nearest(place: Path) -> Path:
    """Return a place, or the nearest one above it that is there, be it a dangling link."""
    return next(path for path in (place, *place.absolute().parents) if os.path.lexists(path))


def check_writable(place: Path) -> None:
    """Refuse a place that cannot be written, before work whose result belongs there.

    Tried in the folder, or in the nearest one above that exists; nothing stays.
    """
    try:
        with TemporaryFile(dir=nearest(place)):
            pass
    except OSError as error:
        raise unwritable(place, 0, error) from error


def flush_tree(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        flush(path)


def flush(path: Path) -> None:
    """Flush one file or folder to disk (a folder: the names in it)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def not_shared(folder: Path, where: str) -> ClusterError:
    """Return the error of workers, "ranks [1]" say, that do not see a folder of the root."""
    return ClusterError(
        "workers must share the artifact root",
        f"{folder}, which is another folder on {where}",
        "Set UMIM_ROOT (UMIM_SCRATCH where that is an address) to a place that every node mounts.",
    )
