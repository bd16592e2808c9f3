"""Data files of tasks: JSON lines under a folder that the user names."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from umim_core.errors import ConfigError, CorpusError

DATA_VARIABLE: Final = "UMIM_TASK_DATA"


def task_folder(named: str | None) -> Path | None:
    """Return the folder of task data: an option, else what ``UMIM_TASK_DATA`` names, else None."""
    folder = named or os.environ.get(DATA_VARIABLE)
    return Path(folder) if folder else None


def refuse_data_variable() -> None:
    """Refuse a folder of task data from the environment, where a recipe says all data.

    Raises:
        ConfigError: If ``UMIM_TASK_DATA`` is set; its data would be in no stage key.
    """
    folder = os.environ.get(DATA_VARIABLE)
    if folder:
        raise ConfigError(
            f"{DATA_VARIABLE} must not be set: the recipe says where questions lie",
            folder,
            "Unset it, on every machine of a cluster, or name it as the recipe's task_data.",
        )


def read_objects(path: str | Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Read the objects of a JSON Lines file; blank lines are skipped.

    Args:
        path: The file: one JSON object per line.

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
