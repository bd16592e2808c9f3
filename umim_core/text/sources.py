"""Where a corpus comes from: five kinds of source, told apart by `kind`."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from umim_core.errors import CorpusError

Paths = Annotated[tuple[str, ...], Field(min_length=1, description="Paths or glob patterns")]
FieldName = Annotated[str, Field(min_length=1, description="Field that holds the text")]
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


class ParquetFiles(_SourceModel):
    """A string column of parquet files."""

    kind: Literal["parquet"] = "parquet"
    paths: Paths
    field: FieldName = "text"
    max_bad: MaxBad = 0


class HubDataset(_SourceModel):
    """A string column of a Hugging Face data set, by hub id or local folder."""

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


def expand(paths: tuple[str, ...]) -> list[Path]:
    """Return the files that the paths and patterns name, patterns in sorted order.

    A path that exists is taken literally, brackets and all.

    Raises:
        CorpusError: A path does not exist, is a folder, or a pattern matches no file.
    """
    files: list[Path] = []
    for name in paths:
        path = Path(name)
        if path.is_file():
            files.append(path)
        elif path.is_dir():
            raise CorpusError(
                "a corpus path must be a file", name, f"Name its files: {name.rstrip('/')}/*.txt"
            )
        elif matches := sorted(filter(Path.is_file, map(Path, glob.glob(name, recursive=True)))):
            files.extend(matches)
        elif glob.has_magic(name):
            raise CorpusError("a pattern must match a file", name, "Check the folder and quoting.")
        else:
            raise CorpusError("a corpus file must exist", name, "Check the path.")
    return files


def source_of(
    names: tuple[str, ...],
    *,
    field: str = "text",
    split: str = "train",
    config: str | None = None,
    max_bad: int = 0,
) -> Source:
    """Tell the kind of source by the names' endings.

    ``.npy`` is token ids (one file), ``.jsonl``/``.json``, ``.parquet``; anything else that exists
    or is a pattern is text files; one name that is neither is a Hugging Face data set.

    Raises:
        CorpusError: If kinds are mixed, or no name is given.
    """
    kinds = {_kind(name) for name in names}
    if len(kinds) != 1:
        raise CorpusError(
            "all sources must be of one kind",
            ", ".join(sorted(kinds)) or "no source",
            "Mine them in separate runs.",
        )
    kind = kinds.pop()
    if kind in ("ids", "dataset") and len(names) != 1:
        raise CorpusError(
            f"a source of kind {kind} must be one name",
            names,
            "Check the paths: a name that is no file is taken for a data set.",
        )
    if kind == "ids":
        return TokenIds(path=names[0])
    if kind == "jsonl":
        return JsonLines(paths=names, field=field, max_bad=max_bad)
    if kind == "parquet":
        return ParquetFiles(paths=names, field=field, max_bad=max_bad)
    if kind == "dataset":
        return HubDataset(name=names[0], config=config, split=split, field=field, max_bad=max_bad)
    return TextFiles(paths=names)


def _kind(name: str) -> str:
    plain = name.removesuffix(".gz").removesuffix(".zst")
    for ending, kind in _ENDINGS.items():
        if plain.endswith(ending):
            return kind
    known = Path(name).is_file() or glob.has_magic(name) or Path(plain).suffix in (".txt", ".md")
    return "text" if known else "dataset"


_ENDINGS = {".npy": "ids", ".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
