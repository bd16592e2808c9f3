"""Time of a request without the pauses of whoever consumes it."""

from __future__ import annotations

import time


class LapClock:
    """Seconds in laps, the first of which begins at once.

    Attributes:
        laps: Seconds of each lap that has ended.
    """

    def __init__(self) -> None:
        self.laps: list[float] = []
        self.start()

    @property
    def first(self) -> float:
        """Seconds of the first lap."""
        return self.laps[0]

    def start(self) -> None:
        """Begin a lap."""
        self._began = time.perf_counter()

    def stop(self) -> None:
        """End it."""
        self.laps.append(time.perf_counter() - self._began)
