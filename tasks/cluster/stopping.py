"""Stop of a run: TERM, Ctrl-C and a cancelled flow run end it in seconds.

Everything that is worth keeping is on disk already, whole or not at all, so a stop clears up and
ends the process where it stands; nothing is unwound through libraries that swallow signals, retry
or wait. In this order: the workers are killed, MLflow and Prefect hear of it (two seconds at most),
what is left is killed by the guard (``guard.py``), one line says how to go on.

The main thread may be in a C call that lets no Python signal handler run. Therefore the kernel
writes the signal's number into the guard's pipe, and the guard wakes a thread of this process.

Other threads run on until the end, and would take killed workers for lost ones. Where they would
begin something or hand a result on they ask (`park_if_stopping`), and go no further.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final

import psutil

from tasks.cluster import guard

FOLDER_PREFIX: Final = "umim-ray-"  # of the folders of a private cluster; then the driver's pid
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_CALL_SECONDS: Final = 2.0
_GUARD_SECONDS: Final = 1.5
_CLEAR_LINE: Final = "\r\x1b[2K\x1b[?25h"  # a bar may stand there, and have hidden the cursor
StopCall = Callable[[], None]


class _Stopper:
    """The guard of this process, and the calls to make when it is stopped."""

    def __init__(self) -> None:
        token = secrets.token_hex(16)
        os.environ[guard.VARIABLE] = token
        name = f"{FOLDER_PREFIX}{os.getpid()}-"
        prefixes = {str(Path(base) / name) for base in (tempfile.gettempdir(), "/tmp")}  # noqa: S108
        ours, self.pipe = os.pipe()
        self._wakes, theirs = os.pipe()
        command = [sys.executable, "-P", guard.__file__, str(os.getpid()), token, *prefixes]
        # A session of its own: it gets no Ctrl-C, and no TERM to this process's group.
        self._guard = subprocess.Popen(command, stdin=ours, stdout=theirs, start_new_session=True)  # noqa: S603  no argument is anybody's input
        os.close(ours)
        os.close(theirs)
        os.set_blocking(self.pipe, False)
        self.calls: list[StopCall] = []
        self.steps: list[Callable[[], int | None]] = []  # of the trainings under way
        self.stopping = False
        self._callers: frozenset[threading.Thread] = frozenset()
        self._once = threading.Lock()
        threading.Thread(target=self._listen, daemon=True, name="stop").start()
        os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_let_go)

    def _listen(self) -> None:
        number = os.read(self._wakes, 1)
        if number:
            self._stop(number[0])

    def handle(self, number: int, _: FrameType | None) -> None:
        """Stop, and keep the main thread from going on meanwhile."""
        self.stopping = True
        threading.Thread(target=self._stop, args=(number,), daemon=True).start()
        if not _mine.stop_deferred:
            self.park()

    def park(self) -> None:
        """Wait for the end of the process."""
        threading.Event().wait()

    def holds(self, thread: threading.Thread) -> bool:
        """Tell whether a thread must go no further; those that make a stop's calls may."""
        return self.stopping and thread not in self._callers

    def _stop(self, number: int) -> None:
        if not self._once.acquire(blocking=False):
            return
        self.stopping = True
        try:
            self._clear_up()
        finally:
            os._exit(128 + number)

    def _clear_up(self) -> None:
        logging.disable(logging.CRITICAL)  # what dies now would only complain
        threading.excepthook = lambda _: None
        self._kill_children(sparing=_temporary_server())
        self._make_calls()
        self._kill_children()
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.pipe)  # the guard sees the end of its pipe
        with suppress(subprocess.TimeoutExpired):
            self._guard.wait(_GUARD_SECONDS)
        steps = [step for last in self.steps if (step := last()) is not None]
        at = f" at step {' and '.join(map(str, steps))}" if steps else ""
        clear = _CLEAR_LINE if os.isatty(2) else ""
        with suppress(OSError):  # nobody may be reading any more: `... 2>&1 | tee` dies first
            os.write(2, f"{clear}stopped; the same command continues{at}\n".encode())

    def _kill_children(self, sparing: Collection[int] = ()) -> None:
        spared = {self._guard.pid, *sparing}
        children = psutil.Process().children(recursive=True)
        guard.kill([process for process in children if process.pid not in spared])

    def _make_calls(self) -> None:
        threads = [threading.Thread(target=call, daemon=True) for call in self.calls]
        self._callers = frozenset(threads)
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + _CALL_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


class _Mine(threading.local):
    """State of a thread."""

    stop_deferred = False


_mine: Final = _Mine()
_stopper: _Stopper | None = None


@contextmanager
def stoppable() -> Iterator[None]:
    """Let TERM and Ctrl-C end this process in seconds while the block runs.

    For processes that are a run and nothing else: the process ends with status 128 + signal. A
    block inside a block takes the signals back from a library that took them over in between.
    Outside the main thread it does nothing, for signals belong to that one.
    """
    global _stopper
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stopper = _stopper = _stopper or _Stopper()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    woken = signal.set_wakeup_fd(stopper.pipe, warn_on_full_buffer=False)
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as nohup and shells do for Ctrl-C in the background
            signal.signal(number, stopper.handle)
    try:
        yield
    finally:
        if stopper.stopping:
            stopper.park()
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            if handler is not None:  # None: set by C code, which Python cannot set again
                signal.signal(number, handler)


def is_stoppable() -> bool:
    """Tell whether this process is, or has been, in a `stoppable` block."""
    return _stopper is not None


@contextmanager
def on_stop(call: StopCall) -> Iterator[None]:
    """Have a stop within the block call a function, in a thread and not waited for too long."""
    if _stopper is None:
        yield
        return
    _stopper.calls.append(call)
    try:
        yield
    finally:
        _stopper.calls.remove(call)


@contextmanager
def resuming_at(step: Callable[[], int | None]) -> Iterator[None]:
    """Have a stop within the block say at which step the same command goes on."""
    if _stopper is None:
        yield
        return
    _stopper.steps.append(step)
    try:
        yield
    finally:
        _stopper.steps.remove(step)


def park_if_stopping() -> None:
    """Go no further if the process is being stopped: wait for its end, which comes in seconds.

    Calls of the stop itself pass, and so does a block of `stop_deferred`.
    """
    if _stopper is None or _mine.stop_deferred:
        return
    if _stopper.holds(threading.current_thread()):
        _stopper.park()


@contextmanager
def parked_by_a_stop() -> Iterator[None]:
    """Do not begin the block during a stop, and hand nothing on from it: no result, no error.

    Errors of a block that a stop has cut off tell of the stop alone: its workers are killed first.
    """
    park_if_stopping()
    try:
        yield
    finally:
        park_if_stopping()


@contextmanager
def stop_deferred() -> Iterator[None]:
    """Let a thread end the block first: a stop's calls would wait for its lock.

    During a stop the block is not begun.
    """
    if _stopper is None or _mine.stop_deferred:
        yield
        return
    park_if_stopping()
    _mine.stop_deferred = True
    try:
        yield
    finally:
        _mine.stop_deferred = False
        park_if_stopping()


def _temporary_server() -> list[int]:
    """Return the process of Prefect's temporary server, which is killed after the calls."""
    module = sys.modules.get("prefect.server.api.server")
    if module is None:
        return []
    servers = [server.server_process for server in module.SubprocessASGIServer._instances.values()]
    return [process.pid for process in servers if process is not None]


_mask = threading.local()


def _hold_back() -> None:
    """Keep signals from a child that is not yet rid of this process's handlers."""
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _let_go() -> None:
    """Leave the signals of a forked child to the child: its end is not that of the run."""
    signal.set_wakeup_fd(-1)
    for number in _SIGNALS:
        if _stopper is not None and signal.getsignal(number) == _stopper.handle:
            signal.signal(number, signal.SIG_DFL)
    _let_through()
