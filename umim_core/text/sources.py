"""Sources of a corpus, of five kinds: files, their digests, and the documents that they hold.

A source lists its files, says their digests, and gives its documents in parts::

    TextFiles(paths=("books/1.txt", "a.txt"))  ->  documents
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer

from umim_core.addresses import redacted
from umim_core.errors import CorpusError, require
from umim_core.store.artifacts import directory_digest
from umim_core.text.files import CorpusFile, SourceKind, expand
from umim_core.text.rows import (
    BadRows,
    TextPiece,
    dataset_rows,
    decoded,
    field_of,
    json_rows,
    parquet_rows,
    usable,
)

T = TypeVar("T")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")

# Dumped as JSON, for records and messages, addresses go without their credentials.
Paths = Annotated[
    tuple[str, ...],
    Field(
        min_length=1,
        description="Paths, folders, addresses like s3://bucket/key, or glob patterns",
    ),
    PlainSerializer(
        lambda names: [redacted(name) for name in names], return_type=list[str], when_used="json"
    ),
]
FieldName = Annotated[str, Field(min_length=1, description="Field that holds the text")]
MaxBad = Annotated[int, Field(ge=0, description="Unusable rows to skip before giving up")]


class _SourceModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Files(_SourceModel):
    kind: SourceKind
    paths: Paths

    def files(self) -> list[CorpusFile]:
        """Return the files in the order in which they are read."""
        return expand(self.paths, self.kind)

    def digests(self) -> list[str]:
        """Return the SHA-256 of each file."""
        return [file.sha256() for file in self.files()]


class TextFiles(_Files):
    """Text files, one document each; ``.gz``, ``.zst``, ``.xz`` and ``.bz2`` are unpacked."""

    kind: Literal["text"] = "text"

    def parts(self, bad: BadRows) -> Iterator[TextPiece]:
        for file in self.files():
            before = ""  # one part is kept back, for the last one must be known as the last
            with file.open_unpacked() as stream:
                for text in decoded(file, stream):
                    if before:
                        yield before, False
                    before = text
            if before:
                yield before, True


class JsonLines(_Files):
    """JSON objects, one per line or in an array; packed files are unpacked, as text files are."""

    kind: Literal["jsonl"] = "jsonl"
    field: FieldName = "text"
    max_bad: MaxBad = 0
    nul: Annotated[
        Literal["refuse", "keep"],
        Field(description="What becomes of text with NUL characters, mostly damage"),
    ] = "refuse"

    def parts(self, bad: BadRows) -> Iterator[TextPiece]:
        rows = (
            (place, field_of(row, self.field))
            for file in self.files()
            for place, row in json_rows(file)
        )
        return usable(rows, self.max_bad, bad, keep_nul=self.nul == "keep")


class ParquetFiles(_Files):
    """A string column of parquet files."""

    kind: Literal["parquet"] = "parquet"
    field: FieldName = "text"
    max_bad: MaxBad = 0

    def parts(self, bad: BadRows) -> Iterator[TextPiece]:
        rows = (row for file in self.files() for row in parquet_rows(file, self.field))
        return usable(rows, self.max_bad, bad)


class HubDataset(_SourceModel):
    """A string column of a Hugging Face data set, by hub id or local folder.

    A field with dots, like ``solutions.solution``, lies inside a column; each item of a list is a
    document of its own.
    """

    kind: Literal["dataset"] = "dataset"
    name: Annotated[str, Field(min_length=1, description="Hub id or local folder")]
    config: Annotated[str | None, Field(description="Configuration of the data set")] = None
    split: Annotated[str, Field(min_length=1, description="Split, slices allowed")] = "train"
    revision: Annotated[str | None, Field(description="Commit, to pin the data")] = None
    field: FieldName = "text"
    max_bad: MaxBad = 0

    def parts(self, bad: BadRows) -> Iterator[TextPiece]:
        rows = dataset_rows(self.name, self.config, self.split, self.revision, self.field)
        return usable(rows, self.max_bad, bad)

    def digests(self) -> list[str]:
        """Return the commit, or the digest of a local folder; a pinned commit is not asked for."""
        if Path(self.name).is_dir():
            return [directory_digest(Path(self.name))]
        if self.revision is not None and _COMMIT.fullmatch(self.revision):
            return [self.revision]
        from huggingface_hub import HfApi  # takes half a second to import
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # no answer, too

        try:
            return [str(HfApi().dataset_info(self.name, revision=self.revision).sha)]
        except (OSError, HTTPError) as error:
            # A tag or a branch may move: a key made of its name would fit other data later.
            pinned = "" if self.revision is None else f" at revision {self.revision}"
            raise CorpusError(
                "a data set must be reachable, or pinned by a commit of 40 hex digits",
                f"{self.name}{pinned}",
                "Name the commit as its revision, or a local folder.",
            ) from error


class TokenIds(_SourceModel):
    """Ready token ids: a 1-D unsigned integer ``.npy`` file, used as it is."""

    kind: Literal["ids"] = "ids"
    path: Annotated[str, Field(min_length=1, description="Path of the .npy file")]

    def files(self) -> list[CorpusFile]:
        return expand((self.path,), self.kind)

    def digests(self) -> list[str]:
        return [file.sha256() for file in self.files()]


DocumentSource = TextFiles | JsonLines | ParquetFiles | HubDataset
Source = Annotated[
    TextFiles | JsonLines | ParquetFiles | HubDataset | TokenIds, Field(discriminator="kind")
]
MODELS: Final[dict[SourceKind, type[Source]]] = {
    "text": TextFiles,
    "jsonl": JsonLines,
    "parquet": ParquetFiles,
    "dataset": HubDataset,
    "ids": TokenIds,
}


def file_digests(sources: Mapping[str, Source]) -> dict[str, str]:
    """Return the SHA-256 of every file that is read in place, by "name:number"."""
    return {
        f"{name}:{number}": digest
        for name, source in sources.items()
        for number, digest in enumerate(source.digests())
    }


def iter_documents(source: DocumentSource, bad: BadRows | None = None) -> Iterator[str]:
    """Yield the documents of a source, in order, empty ones left out.

    Yields:
        Text without lone surrogates, and without NUL characters but where they are kept.
    """
    parts: list[str] = []
    for text, last in not_empty(source, source.parts(bad or BadRows())):
        parts.append(text)
        if last:
            yield "".join(parts)
            parts = []


def not_empty(source: Source, pieces: Iterable[T]) -> Iterator[T]:
    """Yield what a source gives, which must be something."""
    has_text = False
    for piece in pieces:
        has_text = True
        yield piece
    require(
        has_text,
        CorpusError,
        "a corpus must hold at least one non-empty document",
        source.model_dump(mode="json"),
        "Check the paths and the field name.",
    )
