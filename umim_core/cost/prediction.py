"""Prediction of memory, disk and time: its form for people and for JSON, and its limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from umim_core.errors import ResourceLimitError

GIB: Final = 2.0**30
_HOUR: Final = 3600.0


@dataclass(frozen=True)
class Limits:
    """Limits on the cost of work; None for no limit.

    Attributes:
        memory: Of one process, or of one GPU, in GiB.
        disk: In GiB.
        time: Of all parts, in hours.
    """

    memory: float | None = None
    disk: float | None = None
    time: float | None = None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted cost of a piece of work.

    Attributes:
        work: What is done, for messages.
        basis: Size of it: so many tokens, so many GPUs.
        remedy: What lowers the cost, for messages.
        holder: Whose memory it is.
        memory_bytes: Peak of one holder; 0 where it is not predicted.
        memory_parts: Bytes of its parts, by name for people.
        disk_bytes: Files that are written; likewise.
        seconds: Time by part of the work.
        limits: Most that it may take.
        figures: Further numbers, by name, for JSON.
        notes: Further lines for people, value by name; what it was fitted on or assumes is there.
    """

    work: str
    basis: str
    remedy: str
    holder: str = "process"
    memory_bytes: float = 0.0
    memory_parts: dict[str, float] = field(default_factory=dict)
    disk_bytes: float = 0.0
    seconds: dict[str, float]
    limits: Limits = Limits()
    figures: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def excess(self) -> str | None:
        """The first resource of which more is predicted than its limit allows; None if none is."""
        for name, (found, _) in self._usage().items():
            limit = getattr(self.limits, name)
            if limit is not None and found > limit:
                return name
        return None

    def as_dict(self) -> dict[str, object]:
        """Return the numbers for JSON."""
        sizes = {"memory_bytes": self.memory_bytes, "disk_bytes": self.disk_bytes}
        known = {name: size for name, size in sizes.items() if size}
        return known | {"seconds": self.seconds} | self.figures

    def lines(self) -> list[str]:
        """Return the numbers for people, one a line."""
        rows = {"for": self.basis}
        if self.memory_bytes:
            limit = self.limits.memory
            verdict = "does not fit" if self.excess == "memory" else "fits"
            rows[f"memory of a {self.holder}"] = gib(self.memory_bytes) + (
                f" of {limit:g}, {verdict}" if limit is not None else ""
            )
            rows |= {f"  {name}": gib(size) for name, size in self.memory_parts.items()}
        if self.disk_bytes:
            rows["disk"] = gib(self.disk_bytes)
        for part, taken in self.seconds.items():
            rows[f"time, {part.replace('_', ' ')}"] = _duration(taken)
        if len(self.seconds) > 1:
            rows["time, all"] = _duration(sum(self.seconds.values()))
        return [f"  {name:22}{value}" for name, value in (rows | self.notes).items()]

    def check(self) -> None:
        """Refuse work that is predicted to take more than its limits.

        Raises:
            ResourceLimitError: If it takes more.
        """
        if (name := self.excess) is not None:
            found, unit = self._usage()[name]
            raise ResourceLimitError(
                f"{self.work} must take at most {getattr(self.limits, name):.4g} {unit} of {name}",
                f"{found:.4g} {unit} predicted for {self.basis}",
                self.remedy,
            )

    def _usage(self) -> dict[str, tuple[float, str]]:
        """Return amount and unit of each resource."""
        return {
            "memory": (self.memory_bytes / GIB, "GiB"),
            "disk": (self.disk_bytes / GIB, "GiB"),
            "time": (sum(self.seconds.values()) / _HOUR, "hours"),
        }


def gib(size: float) -> str:
    """Return a number of bytes for people."""
    return f"{size / GIB:.2f} GiB"


def _duration(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds < 2 * _HOUR else f"{seconds / _HOUR:,.1f} h"
