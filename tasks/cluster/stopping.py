"""Stop of a run: TERM, Ctrl-C and a cancelled flow run end it in seconds.

Everything that is worth keeping is on disk already, whole or not at all, so a stop unwinds nothing
through libraries that swallow signals, retry or wait: MLflow and Prefect hear of it (two seconds at
most), one line says how to go on, and the process ends where it stands. Its children end with it,
as they do if it is killed: a program of the code sandbox and a download by the kernel, the process
that writes chats at the end of its input, and Ray's by the kernel and the cluster's guard
(``guard.py``). They are never killed before it, or a thread might take their end for a result.

The main thread may be in a C call that lets no Python signal handler run. Therefore the kernel
writes the signal's number into a pipe, and a thread makes the stop.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import FrameType
from typing import Final

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_CALL_SECONDS: Final = 2.0
_SAY_SECONDS: Final = 0.5
_CLEAR_LINE: Final = "\r\x1b[2K\x1b[?25h"  # a bar may stand there, and have hidden the cursor
StopCall = Callable[[], None]
_calls: Final[list[StopCall]] = []
_once: Final = threading.Lock()


@contextmanager
def stoppable() -> Iterator[None]:
    """Let TERM and Ctrl-C end this process in seconds while the block runs.

    For processes that are a run and nothing else: the process ends with status 128 + signal. A
    block inside a block takes the signals back from a library that took them over in between.
    Outside the main thread it does nothing, for signals belong to that one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    woken = signal.set_wakeup_fd(_pipe(), warn_on_full_buffer=False)
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as nohup and shells do for Ctrl-C in the background
            signal.signal(number, _handle)
    try:
        yield
    finally:
        if _once.locked():  # a run that ends during a stop has been stopped
            threading.Event().wait()
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            if handler is not None:  # None: set by C code, which Python cannot set again
                signal.signal(number, handler)


def is_stoppable() -> bool:
    """Tell whether this process is, or has been, in a `stoppable` block."""
    return _pipe.cache_info().currsize > 0


@contextmanager
def on_stop(call: StopCall) -> Iterator[None]:
    """Have a stop within the block call a function, in a thread and not waited for too long."""
    _calls.append(call)
    try:
        yield
    finally:
        _calls.remove(call)


@cache
def _pipe() -> int:
    """Return the pipe that signals are written into, and have a thread wait for them."""
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    threading.Thread(target=_listen, args=(ours,), daemon=True, name="stop").start()
    # No signal for a forked child until it is rid of the handlers of this process.
    mask = signal.pthread_sigmask
    os.register_at_fork(
        before=lambda: mask(signal.SIG_BLOCK, _SIGNALS),
        after_in_parent=lambda: mask(signal.SIG_UNBLOCK, _SIGNALS),
        after_in_child=_let_go,
    )
    return theirs


def _listen(pipe: int) -> None:
    while (number := os.read(pipe, 1)[0]) not in _SIGNALS:
        pass
    _stop(number)


def _handle(number: int, _: FrameType | None) -> None:
    threading.Thread(target=_stop, args=(number,), daemon=True).start()


def _stop(number: int) -> None:
    if not _once.acquire(blocking=False):
        return
    try:
        logging.disable(logging.CRITICAL)
        threading.excepthook = lambda _: None
        threads = [threading.Thread(target=call, daemon=True) for call in _calls]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + _CALL_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        last = threading.Thread(target=_say, daemon=True)  # a full pipe that nobody reads blocks
        last.start()
        last.join(_SAY_SECONDS)
    finally:
        os._exit(128 + number)


def _say() -> None:
    clear = _CLEAR_LINE if sys.stderr.isatty() else ""
    with suppress(OSError):  # nobody may be reading any more: `... 2>&1 | tee` dies first
        os.write(2, f"{clear}stopped; the same command continues\n".encode())


def _let_go() -> None:
    """Leave the signals of a forked child to the child: its end is not that of the run."""
    signal.set_wakeup_fd(-1)
    for number in _SIGNALS:
        if signal.getsignal(number) is _handle:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
