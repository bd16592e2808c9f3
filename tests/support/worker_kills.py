"""Workers of this process's Ray cluster, killed while they are busy."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import suppress

import psutil

from support.tiny_mining import titles


class WorkerKiller:
    """Kill workers that call themselves by a word, at seeded moments, until the block ends.

    ``times`` are killed, at most ``pause`` seconds apart, whenever it is ``ready``.
    """

    def __init__(
        self,
        doing: str,
        times: int = 1,
        seed: int = 0,
        pause: float = 0.0,
        ready: Callable[[], object] = lambda: True,
    ) -> None:
        self.killed: list[str] = []
        self._doing, self._times, self._random = doing, times, random.Random(seed)
        self._pause, self._ready = pause, ready
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> WorkerKiller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        wait = self._random.uniform(0, self._pause)
        while len(self.killed) < self._times and not self._stop.wait(wait):
            wait = 0.005
            if not self._ready():
                continue
            busy = [p for p, title in titles(psutil.Process()).items() if self._busy(title)]
            if busy:
                victim = self._random.choice(busy)
                with suppress(psutil.Error):
                    title = " ".join(victim.cmdline())
                    if self._busy(title):
                        victim.kill()
                        self.killed.append(title)
                        wait = self._random.uniform(0, self._pause)

    def _busy(self, title: str) -> bool:
        return self._doing in title and not title.startswith("ray::IDLE")
