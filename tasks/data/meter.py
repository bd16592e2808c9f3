"""Counter of the bytes that a cluster's tasks have read so far, shown on the driver."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray
from ray.exceptions import GetTimeoutError, RayError

logger = logging.getLogger("umim.count")
Progress = Callable[[int, int, str], None]
_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 5.0


class ByteMeter:
    """Add up bytes from any worker; a meter that nobody watches costs nothing."""

    def __init__(self, actor: ray.actor.ActorHandle | None) -> None:
        self._actor = actor

    def add(self, count: int) -> None:
        """Report ``count`` bytes more, without waiting."""
        if self._actor is not None:
            self._actor.add.remote(count)


class _Sum:
    def __init__(self) -> None:
        self.total = 0

    def add(self, count: int) -> None:
        self.total += count

    def read(self) -> int:
        return self.total


@contextmanager
def metered(total: int, text: str, progress: Progress | None) -> Iterator[ByteMeter]:
    """Give a meter to hand to tasks, and report it every half second while the block runs."""
    if progress is None:
        yield ByteMeter(None)
        return
    actor = ray.remote(num_cpus=0)(_Sum).remote()
    done = threading.Event()

    def follow() -> None:
        while not done.wait(_POLL_SECONDS):
            try:
                read = ray.get(actor.read.remote(), timeout=_ANSWER_SECONDS)
            except GetTimeoutError:  # the cluster is busy
                continue
            except RayError:
                return
            if not _reported(progress, min(read, total), total, text):
                return

    watcher = threading.Thread(target=follow, daemon=True)
    watcher.start()
    try:
        yield ByteMeter(actor)
    finally:
        done.set()
        watcher.join()
        ray.kill(actor)
    _reported(progress, total, total, text)


def _reported(progress: Progress, done: int, total: int, text: str) -> bool:
    try:
        progress(done, total, text)
    except OSError as error:
        logger.warning("%s: progress is not shown: %s", text, error)
        return False
    return True
