"""Locks of a tracking store without a server: one for writing, one for making it.

MLflow makes the schema of a new store when it first connects. Two processes that do so at once
collide, and it takes longer than a process waits for a store in use; so whoever connects holds a
lock of its own, for which the others wait longer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from umim_core.errors import TrackingError

logger = logging.getLogger("umim.tracking")
_SQLITE: Final = "sqlite:///"
_SILENT_SECONDS: Final = 2


class StoreAwayError(TrackingError):
    """The store does not answer or cannot be used now; later it may."""


@contextmanager
def writing(uri: str, root: Path, seconds: int) -> Iterator[None]:
    """Hold a store for a few writes."""
    with _held(_place(uri, root), "lock", seconds):
        yield


@contextmanager
def connecting(uri: str, root: Path, seconds: int) -> Iterator[None]:
    """Connect to a store as the only process that does so; take it before ``writing``."""
    with _held(_place(uri, root), "connecting.lock", seconds):
        yield


def _place(uri: str, root: Path) -> Path:
    file = uri.removeprefix(_SQLITE).partition("?")[0]
    return Path(file) if uri.startswith(_SQLITE) and file else root / "mlflow"


@contextmanager
def _held(place: Path, ending: str, seconds: int) -> Iterator[None]:
    lock = FileLock(place.with_name(f"{place.name}.{ending}"))
    try:
        with suppress(Timeout):
            lock.acquire(timeout=min(seconds, _SILENT_SECONDS))
        if not lock.is_locked:
            left = max(0, seconds - _SILENT_SECONDS)
            if left:
                logger.info("waiting for another run that uses %s", place)
            lock.acquire(timeout=left)
    except Timeout as error:
        raise StoreAwayError(
            f"the tracking store must be free within {seconds} s",
            str(place),
            "End the process that holds it, or use a server (MLFLOW_TRACKING_URI).",
        ) from error
    try:
        yield
    finally:
        lock.release()
