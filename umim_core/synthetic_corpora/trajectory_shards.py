"""The files of generated trajectories: the questions, and JSON Lines of trajectories in shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import TypeAdapter

from umim_core.store.artifacts import canonical_json, described, read_json, write_json
from umim_core.store.disk import write_bytes
from umim_core.synthetic_corpora.questions import Selection

_QUESTIONS: Final = "questions.json"
_REMEDY: Final = "Delete the file; the same command makes it again."


@dataclass(frozen=True)
class Row:
    """One document of a generated corpus."""

    question: int
    trajectory: int
    ended: Literal["eos", "length"]
    tokens: int
    text: str


_ROW: Final = TypeAdapter(Row)
_SELECTION: Final = TypeAdapter(Selection)


def write_selection(folder: Path, selection: Selection) -> None:
    """Write the questions that are asked, atomically."""
    write_json(folder / _QUESTIONS, asdict(selection))


def has_selection(folder: Path) -> bool:
    """Return whether the questions are there."""
    return (folder / _QUESTIONS).is_file()


def read_selection(folder: Path) -> Selection:
    """Return the questions that are asked.

    Raises:
        ArtifactError: If they are missing or torn.
    """
    path = folder / _QUESTIONS
    with described(f"{path} must hold a selection of questions", _REMEDY):
        return _SELECTION.validate_python(read_json(path))


def shard_path(folder: Path, number: int) -> Path:
    """Return where a shard lies; it is there only when it is whole."""
    return folder / "shards" / f"{number:06}.jsonl"


def write_shard(folder: Path, number: int, rows: Sequence[Row]) -> None:
    """Write a shard, atomically."""
    text = "".join(f"{canonical_json(asdict(row))}\n" for row in rows)
    write_bytes(shard_path(folder, number), text.encode())


def iter_rows(folder: Path) -> Iterator[Row]:
    """Yield the rows of all shards in order.

    Raises:
        ArtifactError: If a shard is torn.
    """
    for path in sorted((folder / "shards").glob("*.jsonl")):
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                with described(f"{path}:{number} must be a trajectory", _REMEDY):
                    row = _ROW.validate_json(line)
                yield row
