"""Token reduction counted by hand: a tokenizer, rules read from parquet, a loop over a set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq

LONGEST = 4


def read_spans(rules: Path) -> set[tuple[int, ...]]:
    """The rules of a rule directory."""
    return {tuple(ids) for ids in pq.read_table(rules / "rules.parquet")["ids"].to_pylist()}


def count_units(ids: Sequence[int], spans: set[tuple[int, ...]]) -> int:
    """Units of a text: left to right, the longest rule first, else one token."""
    place = units = 0
    while place < len(ids):
        for length in range(LONGEST, 0, -1):
            if length == 1 or tuple(ids[place : place + length]) in spans:
                break
        place += length
        units += 1
    return units
