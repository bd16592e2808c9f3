"""Lines of progress for a log file: one at once, one after ten seconds, then one a minute.

A terminal has a bar instead; a log that says nothing for an hour looks like a run that hangs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

_SECOND_LINE: Final = 10.0  # seconds after the first: soon enough to know how long it takes
_EVERY: Final = 60.0  # seconds between later lines


class ProgressLines:
    """Decide when work under way is worth a line, and what the line says.

    The rate is that of the steps seen, so a run that resumes counts from where it went on::

        >>> now = iter([0.0, 10.0])
        >>> lines = ProgressLines(clock=lambda: next(now))
        >>> lines.see(5, 100, "training, loss 3.210")
        'training, loss 3.210: 5 of 100'
        >>> lines.see(25, 100, "training, loss 2.900")
        'training, loss 2.900: 25 of 100, 2.00/s, 38 s left'

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first = (0.0, 0)
        self._total: int | None = None
        self._next = 0.0

    def see(self, step: int, total: int, text: str) -> str | None:
        """Take where the work stands; call it as often as you like.

        Args:
            step: Steps (or other units) done.
            total: Steps in all; another number begins another piece of work. 0: not known yet.
            text: What is being done, with the newest loss where there is one.

        Returns:
            A line to log, or None where the last one is recent.
        """
        now = self._clock()
        silent = self._total is not None and now < self._next
        if total != self._total:
            self._first, self._total = (now, step), total
            if not silent:
                self._next = now + _SECOND_LINE
        if silent:
            return None
        if now > self._first[0]:
            self._next = now + _EVERY
        if not total:
            return text
        began, start = self._first
        rate = (step - start) / (now - began) if now > began else 0.0
        if not rate:
            return f"{text}: {step:,} of {total:,}"
        speed = f"{rate:,.0f}/s" if rate >= 100 else f"{rate:.2f}/s"
        if rate < 1:
            speed = f"{1 / rate:.3g} s each"
        return f"{text}: {step:,} of {total:,}, {speed}, {duration((total - step) / rate)} left"


def duration(seconds: float) -> str:
    """Return a time for people: ``45 s``, ``12 min``, ``3 h 20 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
