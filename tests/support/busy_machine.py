"""Limits on what a process takes that hold on a busy machine: its waits for a processor count not.

Linux writes down for every thread how long it was ready to run while others ran.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_MOST = 10  # times the limit, whatever the machine is busy with


def processor_waits(*pids: int) -> dict[Path, float]:
    """Return by thread of the processes the seconds that it was ready to run and did not."""
    seconds = {}
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with suppress(OSError):  # it has ended
                seconds[thread] = int(thread.read_text("ascii").split()[1]) / 1e9
    return seconds


def within(seconds: float, over: Callable[[], bool], *pids: int) -> bool:
    """Wait until something is over; tell whether it took the processes no longer than that.

    The waits are those of the thread that waited most: threads wait at the same time.
    """
    began, before, waited = time.monotonic(), processor_waits(*pids), 0.0
    while not over():
        waits = processor_waits(*pids).items()
        waited = max([waited, *(wait - before.get(thread, 0.0) for thread, wait in waits)])
        if time.monotonic() - began > min(seconds + waited, _MOST * seconds):
            return over()
        time.sleep(0.02)
    return True
