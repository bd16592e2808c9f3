"""Records on their way to the tracking store: written to disk first, removed once it has them.

A record is one file of JSON in ``<root>/tracking-spool``; the names sort by time. Records of
numbers (``*.json``) are read in that order. Records of files to upload (``*.upload``) are a queue
of their own: one that fails goes to its end. Whoever reads a queue holds its lock and reads the
records of every run, so a process that died leaves nothing behind.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

from filelock import FileLock, Timeout

from umim_core.errors import LockError
from umim_core.store.artifacts import canonical_json
from umim_core.store.disk import write_bytes

logger = logging.getLogger("umim.tracking")
SPOOL: Final = "tracking-spool"
Queue = Literal[".json", ".upload"]
NUMBERS: Final = ".json"
UPLOADS: Final = ".upload"
Record = dict[str, Any]


class Spool:
    """The records of one artifact root."""

    def __init__(self, root: Path) -> None:
        self.folder = root / SPOOL
        self._numbers = itertools.count()
        self._newest_ns = 0

    def add(self, record: Mapping[str, object], queue: Queue = NUMBERS) -> None:
        """Keep a record on disk, after all that were kept before.

        Raises:
            ArtifactError: If the disk refuses it.
        """
        write_bytes(self._last_place(queue), canonical_json(record).encode())

    def _last_place(self, queue: Queue) -> Path:
        self._newest_ns = max(time.time_ns(), self._newest_ns + 1)  # a clock may be set back
        name = f"{self._newest_ns:020d}-{os.getpid()}-{next(self._numbers)}{queue}"
        return self.folder / name

    def waiting(self, queue: Queue = NUMBERS) -> list[Path]:
        """Return the files of the records that no store has yet, the first of the queue first."""
        return sorted(self.folder.glob(f"*{queue}"))

    def all_waiting(self) -> list[Path]:
        """Return the files of the records of both queues."""
        return [*self.waiting(NUMBERS), *self.waiting(UPLOADS)]

    def postpone(self, path: Path) -> None:
        """Put an upload behind all others."""
        path.rename(self._last_place(UPLOADS))

    def refused(self) -> list[Path]:
        """Return the files of the records that a store would not take."""
        return sorted(self.folder.glob("*.refused"))

    def warn(self, reason: str, command: str) -> None:
        """Say what waits and why, that ``command`` writes it, and what was refused."""
        if waiting := len(self.all_waiting()):
            text = "%d records for MLflow wait in %s (%s). The next run writes them, or: %s"
            logger.warning(text, waiting, self.folder, reason, command)
        if refused := len(self.refused()):
            logger.warning("%d records were refused, see %s", refused, self.folder)

    def read(self, path: Path) -> Record | None:
        """Return a record; None, and it is set aside, if the file is damaged."""
        try:
            record = json.loads(path.read_bytes())
        except ValueError as error:
            self.refuse(path, str(error))
            return None
        if not isinstance(record, dict):
            self.refuse(path, f"a record must be a JSON object; got {type(record).__name__}")
            return None
        return record

    def done(self, path: Path) -> None:
        """Forget a record that the store has."""
        path.unlink()

    def refuse(self, path: Path, reason: str) -> None:
        """Set aside a record that the store will never take, so that the others pass."""
        logger.warning("the tracking store refuses %s: %s", path, reason)
        path.rename(path.with_suffix(".refused"))

    @contextmanager
    def reading(self, wait_seconds: float, queue: Queue = NUMBERS) -> Iterator[None]:
        """Hold the right to read a queue; one process at a time has it.

        Raises:
            LockError: If another process still has it after ``wait_seconds``.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.folder / f"{queue}.lock")
        try:
            lock.acquire(timeout=max(0.0, wait_seconds))
        except Timeout as error:
            raise LockError(
                "one process at a time writes the waiting records",
                str(self.folder),
                "It writes those of all processes.",
            ) from error
        try:
            yield
        finally:
            lock.release()
