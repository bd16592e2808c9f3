"""Units found by hand: rules read from parquet, a loop over a set."""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path

import pyarrow.parquet as pq

LONGEST = 16


def read_spans(rules: Path) -> set[tuple[int, ...]]:
    return {tuple(ids) for ids in pq.read_table(rules / "rules.parquet")["ids"].to_pylist()}


def units_of(ids: Sequence[int], spans: Container[tuple[int, ...]]) -> list[tuple[int, int]]:
    """Units (start, tokens) of a text: left to right, the longest rule first, else one token."""
    units, place = [], 0
    while place < len(ids):
        most = min(LONGEST, len(ids) - place)
        fitting = [n for n in range(2, most + 1) if tuple(ids[place : place + n]) in spans]
        units.append((place, max(fitting, default=1)))
        place += units[-1][1]
    return units
