"""Processes that kill themselves at a call of some function; workers killed while they are busy."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil


def die_at(place: str, number: int, when: str) -> None:
    """Have this process kill itself ``before`` or ``after`` a call, from 1, of ``module.function``.

    Whoever looks the function up there from now on gets the deadly one.
    """
    module, _, name = place.rpartition(".")
    owner, calls = importlib.import_module(module), [0]
    call = getattr(owner, name)

    def dying(*args: Any, **named: Any) -> Any:
        calls[0] += 1
        if (calls[0], when) == (number, "before"):
            os.kill(os.getpid(), signal.SIGKILL)
        found = call(*args, **named)
        if calls[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, dying)


def kill_once(
    ready: Callable[[], object], target: Callable[..., object], *arguments: object
) -> None:
    """Call a function in a process of its own, which is killed as soon as it is ``ready``."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    process.start()
    until = time.monotonic() + 1200  # Ray starts slowly on a busy machine
    while not ready() and time.monotonic() < until:
        time.sleep(0.01)
    process.kill()
    process.join()


def titles(parent: psutil.Process) -> dict[psutil.Process, str]:
    """Return what the processes below one call themselves."""
    found: dict[psutil.Process, str] = {}
    for process in parent.children(recursive=True):
        try:
            found[process] = " ".join(process.cmdline())
        except psutil.Error:
            continue
    return found


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
