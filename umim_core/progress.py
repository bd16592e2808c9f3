"""Progress of a training that runs elsewhere: rank 0 leaves a note, the driver follows it.

The notes are lines in the log: one at once, one after ten seconds, then one a minute, for a log
that says nothing for an hour looks like a run that hangs. Whoever listens, as a pipeline does for
MLflow, gets the numbers.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Final, TypeVar

T = TypeVar("T")
logger = logging.getLogger("umim.progress")
_NOTE = "progress.json"
_POLL_SECONDS = 0.5
_LISTENED_SECONDS = 10.0  # between two calls of a listener
_SECOND_LINE: Final = 10.0  # seconds after the first: soon enough to know how long it takes
_EVERY: Final = 60.0  # seconds between later lines
Points = Mapping[str, tuple[int, float]]  # the newest (step, value) of every metric
Listener = Callable[[Points], None]


_listening: ContextVar[tuple[Listener | None, str]] = ContextVar("listening", default=(None, ""))


@lru_cache(1024)
def warn_once(log: logging.Logger, line: str) -> None:
    """Log a warning that a process comes to several times."""
    log.warning("%s", line)


def leave_note(state: Path, step: int, total: int, text: str, points: Points | None = None) -> None:
    """Write where a run stands; a reader sees the old note or the new one, never half of it."""
    state.mkdir(parents=True, exist_ok=True)
    draft = state / f"{_NOTE}.tmp"
    draft.write_text(json.dumps([step, total, text, dict(points or {})]), encoding="utf-8")
    draft.replace(state / _NOTE)


@contextmanager
def listening(listener: Listener, label: str = "") -> Iterator[None]:
    """Give a listener the numbers of every run that is followed in the block, by and by.

    It is called from another thread with the points that are new, every ten seconds at most, and
    with the last ones; it must not raise. ``label`` is what the block works on, for lines of runs
    that go on at the same time.
    """
    token = _listening.set((listener, label))
    try:
        yield
    finally:
        _listening.reset(token)


def current_label() -> str:
    """Return what the innermost ``listening`` block works on, or nothing."""
    return _listening.get()[1]


@contextmanager
def followed(state: Path) -> Iterator[None]:
    """Follow a run's notes while the block runs.

    The logger ``umim.progress`` gets a line a minute, a listener the numbers.
    """
    note = state / _NOTE
    note.unlink(missing_ok=True)  # of the attempt before
    listener, label = _listening.get()
    lines, done = ProgressLines(), threading.Event()
    told: Points = {}
    told_at = -_LISTENED_SECONDS

    def look(last: bool = False) -> None:
        nonlocal told, told_at
        if not note.exists():
            return
        step, total, text, numbers = json.loads(note.read_text(encoding="utf-8"))
        if line := lines.see(step, total, text):
            logger.info("%s%s", f"{label}: " if label else "", line)
        now = time.monotonic()
        if listener and (last or now - told_at >= _LISTENED_SECONDS):
            points = {name: (at, x) for name, (at, x) in numbers.items()}
            if new := {name: x for name, x in points.items() if told.get(name) != x}:
                told, told_at = points, now
                listener(new)

    def follow() -> None:
        while not done.wait(_POLL_SECONDS):
            look()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        look(last=True)


class ProgressLines:
    """Decide when work under way is worth a line, and what the line says.

    The rate is that of the steps seen, so a run that resumes counts from where it went on::

        >>> now = iter([0.0, 10.0])
        >>> lines = ProgressLines(clock=lambda: next(now))
        >>> lines.see(5, 100, "training, loss 3.210")
        'training, loss 3.210: 5 of 100'
        >>> lines.see(25, 100, "training, loss 2.900")
        'training, loss 2.900: 25 of 100, 2.00/s, 38 s left'

    The clock returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first = (0.0, 0)
        self._total: int | None = None
        self._next = 0.0

    def see(self, step: int, total: int, text: str) -> str | None:
        """Take how many steps of ``total`` are done; call it as often as you like.

        Another total begins another piece of work; it is 0 where it is not known yet. Returned is a
        line to log, or None where the last one is recent.
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


def log_progress(text: str) -> Callable[[int, int], None]:
    """Return what takes (done, total) of some work and logs a line now and then."""
    lines = ProgressLines()

    def see(done: int, total: int) -> None:
        line = lines.see(done, total, text)
        if line is not None:
            logger.info("%s", line)

    return see


def counted(
    items: Iterable[T], what: str, size: Callable[[T], int] = lambda item: 1
) -> Iterator[T]:
    """Yield items; where they take longer than ten seconds, say how many there were so far.

    ``size`` is what one of them counts, tokens of a piece say.
    """
    lines, began, total = ProgressLines(), time.monotonic(), 0
    for item in items:
        yield item
        total += size(item)
        if time.monotonic() - began < _SECOND_LINE:  # what is read sooner needs no line
            continue
        if line := lines.see(0, 0, f"{total:,} {what}"):
            logger.info("%s", line)


def numbered(count: int, noun: str) -> str:
    """Return ``1 row`` or ``1,234 rows``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return a time for people: ``45 s``, ``12 min``, ``3 h 20 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
