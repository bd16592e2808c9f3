"""Finished cells of a benchmark on disk, found again by whatever decides their content."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.common import Report
from umim_core.store.artifacts import canonical_json, read_json, sha256_bytes, write_json


def find_cell(folder: Path, key: Mapping[str, Any]) -> Report | None:
    """Return a finished cell, or None."""
    path = folder / _file(key)
    if not path.is_file():
        return None
    found = read_json(path)
    return found if isinstance(found, dict) and found["key"] == dict(key) else None


def keep_cell(folder: Path, key: Mapping[str, Any], cell: Report) -> Report:
    """Write a finished cell, all of it or nothing, and return it with its key."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {"key": dict(key), **cell}
    write_json(folder / _file(key), found)
    return found


def _file(key: Mapping[str, Any]) -> str:
    label = "-".join(str(value).replace(" ", "-") for value in islice(key.values(), 2))
    return f"{label}-{sha256_bytes(canonical_json(key).encode())[:16]}.json"
