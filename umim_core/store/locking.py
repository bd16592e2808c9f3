"""Exclusive locks on directories; a lock of a dead process is recovered by itself.

The lock is an ``flock`` on a file next to the directory, so the kernel frees it when its holder
dies, SIGKILL included. The file names the holder (pid, host and time) for messages only.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Final

from umim_core.errors import LockError

logger = logging.getLogger("umim.lock")
_POLL_SECONDS: Final = 0.2
_NOTE: Final = b"umim lock: "
VARIABLE: Final = "UMIM_MACHINE_LOCK"


@contextmanager
def directory_lock(directory: Path, *, wait_seconds: float | None) -> Iterator[None]:
    """Hold the exclusive lock of ``directory`` (which need not exist): ``.<name>.lock`` next to it.

    Waits for another holder, without limit if ``wait_seconds`` is None.
    """
    path = directory.with_name(f".{directory.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = None if wait_seconds is None else time.monotonic() + wait_seconds
    waits = 0
    while (handle := _try_acquire(path)) is None:
        if deadline is not None and time.monotonic() >= deadline:
            rule = f"only one process may build {directory.name} at a time"
            found = f"lock held by {_holder(path)}"
            raise LockError(rule, found, "Wait for it to end, or stop it.")
        if not waits:
            logger.info("%s: waiting for %s", directory.parent.name, _holder(path))
        waits += 1
        time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while still held, so that no other holder loses its file
        os.close(handle)


def _try_acquire(path: Path) -> int | None:
    handle = _opened(path, 0o666)  # for all that the umask lets share the folder
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(handle).st_ino != path.lstat().st_ino:  # unlinked by the previous holder
            raise FileNotFoundError
        if os.pread(handle, len(_NOTE), 0) not in (b"", _NOTE):
            raise _no_lock_file(path, "a file with something else in it")
    except (BlockingIOError, FileNotFoundError):
        os.close(handle)
        return None
    except LockError:
        os.close(handle)
        raise
    with suppress(OSError):  # a note for people; a full disk must not leave the lock held
        os.ftruncate(handle, 0)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        note = f"pid {os.getpid()} on {socket.gethostname()} since {now}\n"
        os.pwrite(handle, _NOTE + note.encode(), 0)
    return handle


def _opened(path: Path, mode: int) -> int:
    """Open a lock file, making it if need be: a regular file under one name, never a link's."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    except OSError as error:
        if not os.path.lexists(path):
            raise
        raise _no_lock_file(path, error.strerror) from error
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(handle)
        raise _no_lock_file(path, "something else, or a file with several names")
    return handle


def _no_lock_file(path: Path, what: str | None) -> LockError:
    return LockError(
        f"{path} must be a lock file: a regular one of yours, with one name", what, "Remove it."
    )


def _holder(path: Path) -> str:
    try:
        note = path.read_bytes().removeprefix(_NOTE)
    except OSError:
        note = b""
    return note.decode(errors="replace").strip() or "another process"


def measuring() -> AbstractContextManager[None]:
    """Compute alone: no other run of this user computes on this machine while the block runs."""
    return _held(fcntl.LOCK_EX, "waiting for the machine: other runs of this user compute on it")


def computing() -> AbstractContextManager[None]:
    """Compute, but not while another run of this user measures on this machine."""
    return _held(fcntl.LOCK_SH, "waiting for the machine: a run measures on it")


def lock_file() -> Path:
    """Return the file of the lock: ``UMIM_MACHINE_LOCK``, else one of this user's.

    Containers that share a machine share a lock if the variable names a file that all of them see.
    """
    default = Path(tempfile.gettempdir()) / f"umim-machine-{os.getuid()}.lock"
    return Path(os.environ.get(VARIABLE) or default)


@contextmanager
def _held(kind: int, waiting: str) -> Iterator[None]:
    path = lock_file()
    try:
        handle = _opened(path, 0o600)
    except (OSError, LockError) as error:
        rule = "the file of the machine's lock must be writable"
        raise LockError(rule, f"{path}: {error}", f"Set {VARIABLE} to a file of yours.") from error
    try:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("%s", waiting)
            fcntl.flock(handle, kind)
        yield
    finally:
        os.close(handle)
