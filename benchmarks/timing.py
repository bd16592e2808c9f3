"""Times and memory: alternating runs, medians with quartiles, ratios by round, peaks."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

SLOW_SECONDS: Final = 10.0
SLOW_ROUNDS: Final = 3
_STATUS: Final = Path("/proc/self/status")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, quartiles (``low``, ``high``) and number of measurements; at least one."""
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return {"median": float(median), "low": float(low), "high": float(high), "runs": len(values)}


def ratio(seconds: Mapping[str, Sequence[float]], of: str, to: str) -> dict[str, float]:
    """Return how many times as long ``of`` took as ``to``, by pairs of the same round."""
    return spread([a / b for a, b in zip(seconds[of], seconds[to], strict=False)])


def timed(run: Callable[[], object]) -> tuple[float, object]:
    """Return the seconds and the result of one run, with the garbage collector off for it."""
    gc.disable()
    try:
        began = time.perf_counter()
        result = run()
        return time.perf_counter() - began, result
    finally:
        gc.enable()


def device_name(device: torch.device) -> str:
    """Return what a device is called: a GPU's own name, or CPU."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def finished(run: Callable[[], T], device: torch.device) -> Callable[[], T]:
    """Return a run that waits until its device has done all of it."""
    # Not where mining is measured: it imports torch.
    from umim_core.throughput.roofline import synchronize

    def whole() -> T:
        result = run()
        synchronize(device)
        return result

    return whole


def alternate(
    sides: Mapping[str, Callable[[], object]],
    rounds: int,
    warmed: Callable[[str, Any], None] = lambda name, result: None,
) -> dict[str, list[float]]:
    """Run all sides in turn, forwards and backwards, so that drift hits every one of them.

    The first run of each is a warm-up: it compiles, fills caches and is not counted. A side whose
    warm-up takes more than 10 s takes part in the first three rounds only.

    Returns:
        Seconds of each side, one per round.
    """
    slow = set()
    for name, run in sides.items():
        seconds, result = timed(run)
        slow |= {name} if seconds > SLOW_SECONDS else set()
        warmed(name, result)
        del result
    measured: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    for number in range(rounds):
        for name in order:
            if number < SLOW_ROUNDS or name not in slow:
                measured[name].append(timed(sides[name])[0])
        order.reverse()
    return measured


def peak_bytes() -> float:
    """Return the largest resident memory of this process so far, in bytes.

    Linux only. ``getrusage`` will not do: a child begins with the peak of the process that started
    it.
    """
    (line,) = [x for x in _STATUS.read_text().splitlines() if x.startswith("VmHWM:")]
    return float(line.split()[1]) * 1024


def forget_peak() -> None:
    """Let :func:`peak_bytes` begin again at what this process holds now."""
    Path("/proc/self/clear_refs").write_text("5")
