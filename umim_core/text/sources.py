"""Sources of a corpus: five kinds, told apart by `kind`, and digests of what they read."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, ValidationError

from umim_core.addresses import redacted, without_options
from umim_core.errors import ConfigError, CorpusError
from umim_core.store.artifacts import directory_digest
from umim_core.text.files import expand


def _shown(names: tuple[str, ...]) -> list[str]:
    return [redacted(name) for name in names]


# Dumped as JSON, for records and messages, addresses go without their credentials.
Paths = Annotated[
    tuple[str, ...],
    Field(min_length=1, description="Paths, addresses like s3://bucket/key, or glob patterns"),
    PlainSerializer(_shown, return_type=list[str], when_used="json"),
]
FieldName = Annotated[str, Field(min_length=1, description="Field that holds the text")]
NulPolicy = Literal["refuse", "keep"]
MaxBad = Annotated[int, Field(ge=0, description="Unusable rows to skip before giving up")]


class _SourceModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TextFiles(_SourceModel):
    """Text files, one document each; ``.gz`` and ``.zst`` are unpacked."""

    kind: Literal["text"] = "text"
    paths: Paths


class JsonLines(_SourceModel):
    """JSON objects, one per line; ``.gz`` and ``.zst`` are unpacked."""

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


def source_of(
    names: tuple[str, ...],
    *,
    field: str = "text",
    split: str = "train",
    config: str | None = None,
    max_bad: int = 0,
) -> Source:
    """Tell the kind of source by the names' endings.

    ``.npy`` is token ids (one file), ``.jsonl``/``.json``, ``.parquet``; any other file, pattern or
    path is text files; a name like ``owner/name`` is a Hugging Face data set. A folder stands for
    the files of one kind that lie in it and below, each text file a document.
    """
    try:
        return _source(names, field, split, config, max_bad)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{where}: {first['msg']}", first["input"], "Correct it.") from error


def _source(
    names: tuple[str, ...], field: str, split: str, config: str | None, max_bad: int
) -> Source:
    names = tuple(path for name in names for path in _unfolded(name))
    kinds = {_kind(name) for name in names}
    if len(kinds) != 1:
        raise CorpusError(
            "all sources must be of one kind",
            ", ".join(sorted(kinds)) or "no source",
            "Mine them in separate runs.",
        )
    kind = kinds.pop()
    locations = tuple(file.location for file in expand(names)) if kind == "ids" else names
    if kind in ("ids", "dataset") and len(locations) != 1:
        raise CorpusError(
            f"a source of kind {kind} must be one name",
            ", ".join(map(redacted, locations)),
            "Check the paths: a name that is no file is taken for a data set.",
        )
    if kind == "ids":
        return TokenIds(path=locations[0])
    if kind == "jsonl":
        return JsonLines(paths=names, field=field, max_bad=max_bad)
    if kind == "parquet":
        return ParquetFiles(paths=names, field=field, max_bad=max_bad)
    if kind == "dataset":
        return HubDataset(name=names[0], config=config, split=split, field=field, max_bad=max_bad)
    return TextFiles(paths=names)


def _kind(name: str) -> str:
    plain = _plain(name)
    for ending, kind in _ENDINGS.items():
        if plain.endswith(ending):
            return kind
    known = os.path.isfile(name) or glob.has_magic(name) or plain.endswith(_TEXT)
    return "dataset" if not known and _HUB_ID.fullmatch(name) is not None else "text"


def _unfolded(name: str) -> list[str]:
    """Return the corpus files in a folder and below it; any other name as it is."""
    if not os.path.isdir(name):
        return [name]
    files = sorted(str(path) for path in Path(name).rglob("*") if path.is_file())
    matching = [file for file in files if _plain(file).endswith((*_ENDINGS, *_TEXT))]
    if not matching:
        raise CorpusError(
            f"a folder must hold files that end in {', '.join((*_TEXT, *_ENDINGS))}",
            f"{name}, with {len(files)} other files",
            "Name the files themselves.",
        )
    return matching


def _plain(name: str) -> str:
    """Return a name without options of an address and without the ending of packed files."""
    return without_options(name).removesuffix(".gz").removesuffix(".zst")


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
        paths = (source.path,) if isinstance(source, TokenIds) else source.paths
        return [file.sha256() for file in expand(paths)]
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
_TEXT: Final = (".txt", ".md")
_ENDINGS: Final = {".npy": "ids", ".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
