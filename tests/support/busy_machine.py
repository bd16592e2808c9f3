"""Limits on what a process takes that hold on a busy machine: its waits for a processor count not.

Linux writes down for every thread how long it was ready to run while others ran.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def processor_waits(*pids: int) -> float:
    """Return the seconds that threads of processes were ready to run and had no processor."""
    nanoseconds = 0
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with suppress(OSError):  # it has ended
                nanoseconds += int(thread.read_text("ascii").split()[1])
    return nanoseconds / 1e9


def within(seconds: float, over: Callable[[], bool], *pids: int) -> bool:
    """Wait until something is over; tell whether it took the processes no longer than that."""
    began, before, waits = time.monotonic(), processor_waits(*pids), 0.0
    while not over():
        waits = max(waits, processor_waits(*pids) - before)
        if time.monotonic() - began - waits > seconds:
            return over()
        time.sleep(0.02)
    return True
