"""Waits of the host for a GPU, counted by the lines of the product that cause them."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

PRODUCT = tuple(str(Path(__file__).parents[2] / part) for part in ("umim_core", "tasks"))


@dataclass
class Counts:
    """What happened on the device while the context was active.

    Attributes:
        operations: Operations dispatched to the device, views and allocations included.
        synchronisations: Numbers read, copies to the host, results whose size depends on values.
        host_to_device: Copies to the device, host indices included.
        places: How often each line of the product made the host wait or copy.
    """

    operations: int = 0
    synchronisations: int = 0
    host_to_device: int = 0
    places: Counter[str] = field(default_factory=Counter)

    def wait(self) -> None:
        """Count a synchronisation."""
        self.synchronisations += 1
        self.places[f"wait {_place()}"] += 1

    def copy(self, times: int = 1) -> None:
        """Count copies to the device."""
        self.host_to_device += times
        if times:
            self.places[f"copy {_place()}"] += times


def _place() -> str:
    """Return the innermost line of the product under way."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(PRODUCT):
            path = Path(frame.f_code.co_filename)
            return f"{path.parent.name}/{path.name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "a test or a backward pass"
