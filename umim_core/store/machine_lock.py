"""Lock of the machine: measurements wait for computations, and computations for measurements.

The lock is an ``flock`` on one file per user and machine, so the kernel frees it when its holder
dies. Whatever computes holds it shared, whatever measures alone; both hold it as shortly as a stage
lasts.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from umim_core.errors import LockError

logger = logging.getLogger("umim.lock")
VARIABLE: Final = "UMIM_MACHINE_LOCK"
_POLL_SECONDS: Final = 0.2


@contextmanager
def measuring() -> Iterator[None]:
    """Compute alone: no other run of this user computes on this machine while the block runs."""
    with _held(fcntl.LOCK_EX, "waiting for the machine: other runs of this user compute on it"):
        yield


@contextmanager
def computing() -> Iterator[None]:
    """Compute, but not while another run of this user measures on this machine."""
    with _held(fcntl.LOCK_SH, "waiting for the machine: a run measures on it"):
        yield


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
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise LockError(
            "the file of the machine's lock must be writable",
            f"{path}: {error.strerror}",
            f"Set {VARIABLE} to a file of yours.",
        ) from error
    try:
        logged = False
        while not _acquired(handle, kind):
            if not logged:
                logger.warning("%s", waiting)
                logged = True
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(handle)


def _acquired(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
