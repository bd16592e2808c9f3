"""Data files of tasks: JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from umim_core.errors import CorpusError


def read_objects(path: str | Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Read the objects of a JSON Lines file; blank lines are skipped.

    Returns:
        Tuples of place ("<file>:<line>"), line number from 1, and object.

    Raises:
        CorpusError: If the file cannot be read, or a line is no JSON object; the message names
            file and line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(
            f"the data file {path} must be readable UTF-8", str(error), "Check the path."
        ) from error
    # split("\n"), not splitlines(): a JSON string may hold U+2028, which is no line break here.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            place = f"{path}:{number}"
            yield place, number, _object(line, place)


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # no JSON; endless numbers; too many brackets
        raise CorpusError(
            f"{place} must be one JSON object", str(error), "Correct the line."
        ) from error
    if not isinstance(value, dict):
        raise CorpusError(f"{place} must be one JSON object", value, "Correct the line.")
    return value
