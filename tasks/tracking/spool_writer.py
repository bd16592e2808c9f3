"""Delivery of the spool's records, as far as the store answers and patience lasts.

Numbers are written as they come. Files are sent when a run has ended and its numbers are there, so
that no number waits behind a file.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tasks.cluster.stopping import park_if_stopping, stop_deferred
from tasks.tracking.mlflow_store import Store
from tasks.tracking.patience import UPLOAD_SECONDS, Patience
from tasks.tracking.replay import replay
from tasks.tracking.spool import UPLOADS, Spool
from tasks.tracking.store_lock import StoreAwayError
from umim_core.errors import LockError, TrackingError

logger = logging.getLogger("umim.tracking")
T = TypeVar("T")


class SpoolWriter:
    """Write the records of a spool to a store; nothing here raises because it is away.

    Threads may share a writer.
    """

    def __init__(self, store: Store, spool: Spool, patience: Patience | None = None) -> None:
        self._store = store
        self._spool = spool
        self._patience = patience or Patience()
        self._busy = threading.Lock()
        self._reason = ""

    def write(self, *, last: bool = False) -> None:
        """Write what waits, of every run of this root."""
        patience = self._patience
        with stop_deferred(), self._busy:
            if patience.exhausted or (patience.resting() and not last):
                return
            wait_seconds = patience.left if last else 0.0
            # Whoever holds the lock writes our records too.
            with contextlib.suppress(LockError), self._spool.reading(wait_seconds):
                self._write()

    def upload(self) -> None:
        """Send the files that wait, of every run of this root, if numbers do not.

        A file that fails goes behind the others and waits for the next call. Without retries it
        ends this one, for the others may fail as slowly.
        """
        with self._busy, contextlib.suppress(LockError):
            if self._patience.failing or self._patience.exhausted or self._spool.waiting():
                return
            creation, first, _ = self._patience.limits()
            with self._spool.reading(0.0, UPLOADS):
                for path in self._spool.waiting(UPLOADS):
                    park_if_stopping()
                    try:
                        self._write_one(path, (creation, first, UPLOAD_SECONDS))
                    except StoreAwayError as error:
                        logger.warning("a file waits for MLflow: %s", error)
                        self._reason = str(error.value)
                        self._spool.postpone(path)
                        if not self._patience.retries:
                            return

    def hurry(self) -> None:
        """Wait two seconds more at most: the process is being stopped."""
        self._patience.hurry()

    @property
    def reason(self) -> str:
        """Why records still wait."""
        return self._reason or "another process is writing"

    def ask(self, question: Callable[[Store], T]) -> T | None:
        """Return what the store answers; None if it does not now."""
        with stop_deferred(), self._busy:
            if self._patience.exhausted or self._patience.resting():
                return None
            since = time.monotonic()
            try:
                with self._store.session(*self._patience.limits()) as store:
                    return question(store)
            except StoreAwayError as error:
                self._failed(error, since)
                return None

    def _write(self) -> None:
        since = time.monotonic()
        try:
            while waiting := self._spool.waiting():  # others add records meanwhile
                for path in waiting:
                    since = time.monotonic()
                    self._write_one(path, self._patience.limits())
        except StoreAwayError as error:
            self._failed(error, since)
            return
        if self._patience.failing:
            logger.info("MLflow answers again and has what waited")
        self._reason = ""
        self._patience.succeeded()

    def _write_one(self, path: Path, limits: tuple[int, int, int]) -> None:
        record = self._spool.read(path)
        if record is None:
            return
        try:
            with self._store.session(*limits, self._patience.retries) as store:
                replay(store, record)
        except StoreAwayError:
            raise
        except TrackingError as error:
            self._spool.refuse(path, str(error))
        else:
            self._spool.done(path)

    def _failed(self, error: StoreAwayError, since: float) -> None:
        if not self._patience.failing:
            logger.warning("MLflow is away, the run goes on: %s", error)
        self._reason = str(error.value)
        self._patience.failed(time.monotonic() - since)
