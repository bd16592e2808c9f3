"""The rows of the embedded corpus and their files: one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from umim_core.errors import CorpusError
from umim_core.store.disk import write_bytes

ObjectKind = Literal["module", "class", "function"]


@dataclass(frozen=True)
class Document:
    """One docstring after the removal of repeated paragraphs.

    Attributes:
        id: ``"<posix module path>::<qualified name>"``; a ``#2``, ``#3`` ... follows a name that
            the module defines again. The module itself has an empty qualified name.
        text: The paragraphs that are left, joined by blank lines.
        name: The name of the object; for a module its stem, for ``__init__`` its folder.
        has_summary: Whether the docstring's own first paragraph is still there.
    """

    id: str
    text: str
    name: str
    kind: ObjectKind
    has_summary: bool


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write one JSON line per row, under the final name only when all of it is there."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    write_bytes(path, "".join(lines).encode())


def read_documents(path: Path) -> Iterator[Document]:
    """Yield the documents of one file that `build_corpus` wrote."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise CorpusError(
            "the embedded corpus must be built first", str(path), "Run `build_corpus`."
        ) from error
    with file:
        for number, line in enumerate(file, start=1):
            try:
                yield Document(**json.loads(line))
            except (TypeError, ValueError) as error:
                raise CorpusError(
                    f"{path}:{number} must be a document of the embedded corpus",
                    line.decode(errors="replace"),
                    "Delete the folder and build the corpus again.",
                ) from error
