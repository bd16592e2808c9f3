"""Sources of a corpus: five kinds, told apart by `kind`, and digests of what they read."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, ValidationError

from umim_core.addresses import is_address, redacted
from umim_core.errors import ConfigError, CorpusError, require
from umim_core.store.artifacts import directory_digest
from umim_core.text.files import CorpusFile, expand, kind_of, unknown_kind


def _shown(names: tuple[str, ...]) -> list[str]:
    return [redacted(name) for name in names]


# Dumped as JSON, for records and messages, addresses go without their credentials.
Paths = Annotated[
    tuple[str, ...],
    Field(
        min_length=1,
        description="Paths, folders, addresses like s3://bucket/key, or glob patterns",
    ),
    PlainSerializer(_shown, return_type=list[str], when_used="json"),
]
FieldName = Annotated[str, Field(min_length=1, description="Field that holds the text")]
Kind = Literal["text", "jsonl", "parquet", "dataset", "ids"]
NulPolicy = Literal["refuse", "keep"]
MaxBad = Annotated[int, Field(ge=0, description="Unusable rows to skip before giving up")]


class _SourceModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TextFiles(_SourceModel):
    """Text files, one document each; ``.gz``, ``.zst``, ``.xz`` and ``.bz2`` are unpacked."""

    kind: Literal["text"] = "text"
    paths: Paths


class JsonLines(_SourceModel):
    """JSON objects, one per line or in an array; packed files are unpacked, as text files are."""

    kind: Literal["jsonl"] = "jsonl"
    paths: Paths
    field: FieldName = "text"
    max_bad: MaxBad = 0
    nul: Annotated[
        NulPolicy, Field(description="What becomes of text with NUL characters, mostly damage")
    ] = "refuse"


class ParquetFiles(_SourceModel):
    """A string column of parquet files."""

    kind: Literal["parquet"] = "parquet"
    paths: Paths
    field: FieldName = "text"
    max_bad: MaxBad = 0


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


class TokenIds(_SourceModel):
    """Ready token ids: a 1-D unsigned integer ``.npy`` file, used as it is."""

    kind: Literal["ids"] = "ids"
    path: Annotated[str, Field(min_length=1, description="Path of the .npy file")]


DocumentSource = TextFiles | JsonLines | ParquetFiles | HubDataset
Source = Annotated[
    TextFiles | JsonLines | ParquetFiles | HubDataset | TokenIds, Field(discriminator="kind")
]


@dataclass(frozen=True)
class Reading:
    """How the names of a corpus are read; what is None is not given.

    Attributes:
        default_split: Split of a data set where none is given.
    """

    kind: Kind | None = None
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
        bool(corpora) or not (reading.given or reading.kind),
        ConfigError,
        "options of a corpus need one",
        ", ".join(["kind"] * (reading.kind is not None) + list(reading.given)),
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
        kinds = Counter(_kind(place) for place in places)
        if len(kinds) != 1:
            raise CorpusError(
                "a corpus must be of one kind",
                ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "no name",
                "Name files of one kind; of a folder, --kind text (or another) takes only those.",
            )
        (kind,) = kinds
    if kind in ("ids", "dataset") and len(places) != 1:
        raise CorpusError(
            f"a corpus of kind {kind} must be one name",
            ", ".join(map(redacted, places)),
            "Check the paths: a name that is no file is taken for a data set.",
        )
    model = _MODELS[kind]
    fields = {name: value for name, value in reading.given.items() if name in model.model_fields}
    if kind == "dataset":
        fields |= {"name": places[0], "split": fields.get("split", reading.default_split)}
    elif kind == "ids":
        fields["path"] = places[0]
    else:
        fields["paths"] = places
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{where}: {first['msg']}", first["input"], "Correct it.") from error


def _places(name: str, kind: Kind | None) -> list[str]:
    """Return the files of a folder or of a local pattern; any other name as it is."""
    local = not is_address(name) and not os.path.isfile(name)
    if local and (os.path.lexists(name) or glob.has_magic(name)):
        return [file.location for file in expand((name,), kind)]
    return [name]


def _kind(name: str) -> Kind:
    kind = kind_of(name)
    if kind is not None:
        return cast(Kind, kind)
    parent, _, last = name.rpartition("/")
    # A file that is missing is no data set: hub ids have an owner, and no folder here.
    like_hub = _HUB_ID.fullmatch(name) and (parent or "." not in last) and not os.path.isdir(parent)
    if like_hub and not os.path.lexists(name):
        return "dataset"
    require(
        is_address(name) or os.path.lexists(name),
        CorpusError,
        "a corpus file must exist",
        name,
        "Check the path.",
    )
    raise unknown_kind(name)


def files_of(source: TextFiles | JsonLines | ParquetFiles | TokenIds) -> list[CorpusFile]:
    """Return the files of a source, in the order in which they are read."""
    return expand((source.path,) if isinstance(source, TokenIds) else source.paths, source.kind)


def file_digests(sources: Mapping[str, Source]) -> dict[str, str]:
    """Return the SHA-256 of every file that is read in place, by "name:number"."""
    return {
        f"{name}:{number}": digest
        for name, source in sources.items()
        for number, digest in enumerate(source_digests(source))
    }


def source_digests(source: Source) -> list[str]:
    """Return the SHA-256 of each file of a source, or a data set's commit.

    The hub is not asked for a commit that is pinned.
    """
    if not isinstance(source, HubDataset):
        return [file.sha256() for file in files_of(source)]
    if Path(source.name).is_dir():
        return [directory_digest(Path(source.name))]
    if source.revision is not None and _COMMIT.fullmatch(source.revision):
        return [source.revision]
    from huggingface_hub import HfApi  # takes half a second to import
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of connections too

    try:
        return [str(HfApi().dataset_info(source.name, revision=source.revision).sha)]
    except (OSError, HTTPError) as error:
        if source.revision is not None:
            return [source.revision]
        raise CorpusError(
            "a data set must be reachable, or pinned by its revision",
            source.name,
            "Name a revision (a commit), or a local folder.",
        ) from error


_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_HUB_ID: Final = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
_MODELS: Final[dict[Kind, type[Source]]] = {
    "text": TextFiles,
    "jsonl": JsonLines,
    "parquet": ParquetFiles,
    "dataset": HubDataset,
    "ids": TokenIds,
}
