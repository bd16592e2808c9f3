"""Predicted costs of mining, and their limits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

from umim_core.errors import ResourceLimitError

_GIB: Final = 2.0**30
_HOUR: Final = 3600.0


@dataclass(frozen=True)
class Prediction:
    """Predicted cost of mining.

    Attributes:
        tokens: Tokens of the corpus.
        memory_bytes: Resident memory of a process that counts, at its peak.
        disk_bytes: Token shards, frequent n-grams and rules.
        shuffle_bytes: (key, count) pairs that move between the workers of a cluster.
        seconds: Per stage.
        distinct: Distinct candidate n-grams per order that such a process counts.
        frequent: Of these, how many reach tau.
    """

    tokens: int
    memory_bytes: float
    disk_bytes: float
    shuffle_bytes: float
    seconds: dict[str, float]
    distinct: dict[int, float]
    frequent: dict[int, float]

    def as_dict(self) -> dict[str, object]:
        """Return the numbers for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the numbers for people, one a line."""
        times = self.seconds
        rows = [
            ("tokens", f"{self.tokens:,}"),
            ("memory of a process", f"{self.memory_bytes / _GIB:.2f} GiB"),
            ("disk", f"{self.disk_bytes / _GIB:.2f} GiB"),
            ("shuffled", f"{self.shuffle_bytes / _GIB:.2f} GiB"),
            *((f"time, {name.replace('_', ' ')}", f"{times[name]:,.1f} s") for name in times),
            ("time, all", f"{sum(times.values()):,.1f} s"),
            *((f"frequent {n}-grams", f"{count:,.0f}") for n, count in self.frequent.items()),
        ]
        return [f"  {name:20}{value:>18}" for name, value in rows]


@dataclass(frozen=True)
class Limits:
    """Limits on the cost of mining; None for no limit.

    Attributes:
        memory_bytes: Resident memory.
        disk_bytes: Disk.
        seconds: Time of all stages.
    """

    memory_bytes: float | None = None
    disk_bytes: float | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, gib_memory: float | None, gib_disk: float | None, hours: float | None) -> Limits:
        """Return limits given in GiB and hours."""
        given = ((gib_memory, _GIB), (gib_disk, _GIB), (hours, _HOUR))
        return cls(*(None if value is None else value * unit for value, unit in given))

    def check(self, prediction: Prediction) -> None:
        """Refuse a prediction beyond a limit.

        Raises:
            ResourceLimitError: If there is one.
        """
        total = sum(prediction.seconds.values())
        for name, unit, found, limit in (
            ("memory", _GIB, prediction.memory_bytes, self.memory_bytes),
            ("disk", _GIB, prediction.disk_bytes, self.disk_bytes),
            ("time", _HOUR, total, self.seconds),
        ):
            if limit is not None and found > limit:
                kind = "hours" if name == "time" else "GiB"
                raise ResourceLimitError(
                    f"mining must take at most {limit / unit:.3g} {kind} of {name}",
                    f"{found / unit:.3g} {kind} predicted for {prediction.tokens:,} tokens",
                    "Raise tau or the limit, or use candidate mode (sample_tokens).",
                )
