"""Sources of a corpus, of five kinds, from a recipe or from the names that a command is given.

A source lists its files, says their digests, and gives its documents in parts. For a command, a
folder stands for its files::

    ("books", "a.txt")  ->  TextFiles(paths=("books/1.txt", "books/2.txt", "a.txt"))  ->  documents
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer

from umim_core.addresses import is_address, redacted
from umim_core.errors import ConfigError, CorpusError, require
from umim_core.store.artifacts import described, directory_digest
from umim_core.text.files import CorpusFile, SourceKind, expand, kind_of, unknown_kind
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
_HUB_ID: Final = re.compile(r"\w[\w.-]*(/[\w.-]+)?")

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
            has_text = False
            with file.open_unpacked() as stream:
                for text in decoded(file, stream):
                    has_text = True
                    yield text, False
            if has_text:
                yield "", True


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

    @property
    def folder(self) -> Path | None:
        """The local folder, None for a data set of the hub."""
        folder = Path(self.name)
        return folder if folder.is_dir() else None

    def parts(self, bad: BadRows) -> Iterator[TextPiece]:
        rows = dataset_rows(self.name, self.config, self.split, self.revision, self.field)
        return usable(rows, self.max_bad, bad)

    def digests(self) -> list[str]:
        """Return the commit, or the digest of a local folder; a pinned commit is not asked for."""
        if self.folder is not None:
            return [directory_digest(self.folder)]
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
Source = Annotated[DocumentSource | TokenIds, Field(discriminator="kind")]
_MODELS: Final[dict[SourceKind, type[Source]]] = {
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


# Names and options of a command


@dataclass(frozen=True)
class Reading:
    """How the names of a corpus are read; what is None is not given.

    Attributes:
        default_split: Split of a data set where none is given.
    """

    kind: SourceKind | None = None
    field: str | None = None
    split: str | None = None
    config: str | None = None
    max_bad: int | None = None
    default_split: str = "train"

    @property
    def given(self) -> dict[str, object]:
        """The options of rows and data sets that are given, by name."""
        values = {name: getattr(self, name) for name in ("field", "split", "config", "max_bad")}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def flags(self) -> dict[str, object]:
        """All that are given, as options of a command."""
        kind = {} if self.kind is None else {"--kind": self.kind}
        return kind | {f"--{name.replace('_', '-')}": value for name, value in self.given.items()}


_AS_THEY_ARE: Final = Reading()


def source_of(names: tuple[str, ...], reading: Reading = _AS_THEY_ARE) -> Source:
    """Return the source that names and options describe; see `sources_of`."""
    return sources_of([names], reading)[0]


def sources_of(corpora: Sequence[tuple[str, ...]], reading: Reading = _AS_THEY_ARE) -> list[Source]:
    """Return the source of each corpus, of the kind that is given or that its names end in.

    A folder stands for the files of one kind that lie in it and below, each text file a document. A
    name like ``owner/name`` that is no file is a Hugging Face data set. An option that says nothing
    about any of the corpora is refused.
    """
    require(
        bool(corpora) or not reading.flags,
        ConfigError,
        "options of a corpus need one",
        ", ".join(reading.flags),
        "Name its files, or leave the options out.",
    )
    sources = [_source(names, reading) for names in corpora]
    for name, value in reading.given.items():
        users = [kind for kind, model in _MODELS.items() if name in model.model_fields]
        require(
            any(source.kind in users for source in sources),
            ConfigError,
            f"--{name.replace('_', '-')} is of corpora of the kinds {', '.join(users)}",
            f"{value} for {', '.join(source.kind for source in sources)}",
            "Leave it out: it would have no effect.",
        )
    return sources


def _source(names: tuple[str, ...], reading: Reading) -> Source:
    kind, places = reading.kind, names
    if kind != "dataset":
        places = tuple(place for name in names for place in _places(name, kind))
    if kind is None:
        kinds = Counter(map(_kind, places))
        require(
            len(kinds) == 1,
            CorpusError,
            "a corpus must be of one kind",
            ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "no name",
            "Name files of one kind; of a folder, --kind text (or another) takes only those.",
        )
        (kind,) = kinds
    require(
        len(places) == 1 or kind not in ("ids", "dataset"),
        CorpusError,
        f"a corpus of kind {kind} must be one name",
        ", ".join(map(redacted, places)),
        "Check the paths: a name that is no file is taken for a data set.",
    )
    model = _MODELS[kind]
    fields = {name: value for name, value in reading.given.items() if name in model.model_fields}
    if kind == "dataset":
        fields |= {"name": places[0], "split": fields.get("split", reading.default_split)}
    else:
        fields |= {"path": places[0]} if kind == "ids" else {"paths": places}
    with described("a corpus must be given as it can be read", "Correct it.", ConfigError):
        return model.model_validate(fields)


def _places(name: str, kind: SourceKind | None) -> list[str]:
    """Return the files of a folder or of a local pattern; any other name as it is."""
    local = not is_address(name) and not os.path.isfile(name)
    if local and (os.path.lexists(name) or glob.has_magic(name)):
        return [file.location for file in expand((name,), kind)]
    return [name]


def _kind(name: str) -> SourceKind:
    kind = kind_of(name)
    if kind is not None:
        return kind
    if is_address(name) or os.path.lexists(name):
        raise unknown_kind(name)
    parent, _, last = name.rpartition("/")
    # A file that is missing is no data set: hub ids have an owner, and no folder here.
    like_hub = _HUB_ID.fullmatch(name) and (parent or "." not in last) and not os.path.isdir(parent)
    require(bool(like_hub), CorpusError, "a corpus file must exist", name, "Check the path.")
    return "dataset"
