"""Elapsed time of a run by stage, as lines of a small table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tasks.run.stage import Artifact

_HEADINGS = "stage", "built", "seconds"


def time_lines(artifacts: Sequence[Artifact], elapsed: float, at_a_time: int) -> list[str]:
    """Return a table of what was built in a run, the longest first; nothing if nothing was."""
    seconds = defaultdict[str, list[float]](list)
    for artifact in artifacts:
        if artifact.executed:
            seconds[artifact.stage].append(float(artifact.manifest()["facts"]["seconds"]))
    if not seconds:
        return []
    ordered = sorted(seconds.items(), key=lambda item: -sum(item[1]))
    rows = [(name, str(len(own)), f"{sum(own):.0f}") for name, own in ordered]
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
    lines = [
        f"{name:<{widths[0]}}  {built:>{widths[1]}}  {took:>{widths[2]}}"
        for name, built, took in (_HEADINGS, *rows)
    ]
    total = sum(map(sum, seconds.values()))
    side_by_side = f"; up to {at_a_time} stages at a time, together {total:.0f} s"
    shared = side_by_side if at_a_time > 1 else ""
    return [*lines, f"elapsed: {elapsed:.0f} s{shared}"]
