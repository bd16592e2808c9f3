"""Data files of tasks: JSON lines under a folder that the user names, or a table of the hub."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from umim_core.errors import ConfigError, CorpusError
from umim_core.text.hub_dataset import open_hub_dataset

DATA_VARIABLE: Final = "UMIM_TASK_DATA"


@dataclass(frozen=True)
class HubTable:
    """A data set of the Hugging Face hub that holds the rows of a data file.

    Attributes:
        path: Repository, or a local folder whose relative path equals it.
        split: Split that is scored.
        name: Configuration, where there are several.
        columns: Column of the hub for a column of the file, where they differ.
    """

    path: str
    split: str
    name: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DataFile:
    """Questions in a file of JSON lines, one object per line.

    Attributes:
        path: File, relative to the folder of task data.
        fields: Columns with text that prompt or metrics read.
        reference: Column with the right answer: a text, or a list of texts.
        origin: Name and publisher of the data set, for people who look for it.
        id: Column that names a question; the line number stands in where it is missing.
        hub: Table that is read where no folder is named; None if there is none.
    """

    path: str
    fields: tuple[str, ...]
    reference: str
    origin: str
    id: str = "id"
    hub: HubTable | None = None


def task_folder(named: str | None) -> Path | None:
    """Return the folder of task data: an option, else what ``UMIM_TASK_DATA`` names, else None."""
    found = named or os.environ.get(DATA_VARIABLE)
    return Path(found) if found else None


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
            "Unset it, on every machine of a cluster, or give the folder as the recipe's task_data "
            "or data_files.",
        )


def read_rows(
    file: DataFile, folder: Path | None, revision: str | None = None
) -> Iterator[dict[str, Any]]:
    """Read the rows of a data file, with the columns ``id``, the fields and ``references``.

    Args:
        file: The file.
        folder: Folder of task data; None reads the hub's table.
        revision: Of the hub's table; None for its newest.

    Raises:
        ConfigError: If a revision is named and a folder is read.
        CorpusError: If there is neither, or a row lacks a column or holds other than text there.
    """
    if folder is not None and revision is not None:
        raise ConfigError(
            f"a revision is one of the hub's data set, and {file.path} is read from a folder",
            f"revision {revision}, folder {folder}",
            "Leave out one of the two.",
        )
    rows = _hub_rows(file, revision) if folder is None else _lines(file, folder / file.path)
    for place, number, row in rows:
        made: dict[str, Any] = {"id": str(row.get(file.id, number))}
        for column in file.fields:
            made[column] = _text(row, column, file, place)
        answer = row.get(file.reference)
        if isinstance(answer, list) and answer and all(isinstance(text, str) for text in answer):
            made["references"] = list(answer)
        else:
            made["references"] = [_text(row, file.reference, file, place)]
        yield made


def _text(row: Mapping[str, Any], column: str, file: DataFile, place: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        wanted = ", ".join((*file.fields, file.reference))
        raise CorpusError(
            f"a row of {file.path} must hold the columns {wanted} with text",
            f"{place}: {column} is {'missing' if value is None else type(value).__name__}",
            f"Write it so; the file holds {file.origin}.",
        )
    return value


def find_data_file(name: str, folder: Path) -> Path:
    """Find the file of a data set that has no fixed path: the only one of its name, at any depth.

    Args:
        name: The data set; its file is ``<name>.jsonl``, or begins with ``<name>_`` and ends in
            ``.jsonl``.
        folder: Folder of task data.

    Raises:
        CorpusError: If there is no such file, or more than one.
    """
    found = sorted({*folder.rglob(f"{name}.jsonl"), *folder.rglob(f"{name}_*.jsonl")})
    if len(found) != 1:
        raise CorpusError(
            f"the folder of data must hold one file {name}.jsonl or {name}_*.jsonl",
            ", ".join(map(str, found)) or f"none in {folder}",
            f"Put the data set there under this name, and no other; {DATA_VARIABLE} names the "
            "folder.",
        )
    return found[0]


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
        found = json.loads(line)
    except (ValueError, RecursionError) as error:  # no JSON; endless numbers; too many brackets
        raise CorpusError(
            f"{place} must be one JSON object", str(error), "Correct the line."
        ) from error
    if not isinstance(found, dict):
        raise CorpusError(f"{place} must be one JSON object", found, "Correct the line.")
    return found


def _lines(file: DataFile, path: Path) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    if not path.is_file():
        raise CorpusError(
            f"the folder of task data ({DATA_VARIABLE}, the option task_data or a table's "
            f"data_files) must hold {file.path}",
            f"no file {path}",
            f"Put {file.origin} there, one JSON object per line with the columns "
            f"{', '.join((*file.fields, file.reference))}.",
        )
    yield from read_objects(path)


def _hub_rows(file: DataFile, revision: str | None) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    if file.hub is None:
        raise CorpusError(
            f"the data file {file.path} must be at hand: no data set of the hub has its form",
            f"{DATA_VARIABLE} is not set",
            f"Put {file.origin} into a folder and name it: {DATA_VARIABLE}=FOLDER, or the option "
            "task_data.",
        )
    hub = file.hub
    try:
        table = open_hub_dataset(hub.path, hub.name, hub.split, revision)
    except CorpusError as error:
        raise CorpusError(
            f"the data set {hub.path} must be within reach of the hub's client, or {file.path} in "
            f"a folder that {DATA_VARIABLE} names",
            error.value,
            f"It holds {file.origin}.",
        ) from error
    for number, row in enumerate(table):
        renamed = {own: row[theirs] for own, theirs in hub.columns.items() if theirs in row}
        yield f"{hub.path}, row {number}", number, {**row, **renamed}
