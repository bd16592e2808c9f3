"""Sources of a corpus: what names stand for, and the files behind them.

A recipe writes a source out; for a command, its names become one, and a folder stands for its
files::

    ("books", "a.txt")  ->  TextFiles(paths=("books/1.txt", "books/2.txt", "a.txt"))

An address is ``scheme://place/path?options`` of a file system that Arrow knows: S3, GCS, HDFS ...;
Arrow reads the options, ``?region=eu-west-1&endpoint_override=127.0.0.1:9000&scheme=http`` say. It
may carry credentials: ``str(file)`` is safe in messages, ``file.location`` is not. The ending of a
name, in any case, says what a file holds; what it does not say is never guessed.
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Final, Literal, Self
from urllib.parse import quote, unquote

import numpy as np
from pyarrow import fs
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer

from umim_core.addresses import is_address, redacted
from umim_core.errors import ArtifactError, ConfigError, CorpusError, require
from umim_core.progress import logger, warn_once
from umim_core.store.arrays import open_array
from umim_core.store.artifacts import described, directory_digest
from umim_core.text.documents import (
    UNPACK,
    BadRows,
    CorpusFile,
    TextPiece,
    dataset_rows,
    document_of,
    endings_of,
    field_of,
    hub_commit,
    json_rows,
    parquet_rows,
    usable,
)
from umim_core.text.reading import Reading, SourceKind
from umim_core.text.token_ids import Ids, check_range

Names = list[str] | tuple[str, ...]  # not Sequence: a text is one, of its characters
_ENDINGS: Final[dict[SourceKind, tuple[str, ...]]] = {
    "text": (".txt", ".text", ".md", ".markdown", ".rst"),
    "jsonl": (".jsonl", ".ndjson", ".jsonlines", ".json"),
    "parquet": (".parquet", ".pq"),
    "ids": (".npy",),
}
_KNOWN: Final = ", ".join(ending for endings in _ENDINGS.values() for ending in endings)
_SHOWN: Final = 12  # reasons at most in one line
_CHUNK_IDS: Final = 1 << 20
_HUB_ID: Final = re.compile(r"\w[\w.-]*/[\w.-]+")


# Names


def kind_of(name: str) -> SourceKind | None:
    """Return the kind that a name's ending stands for, None for an ending that says nothing."""
    ending, packer = endings_of(name)
    kind = next((kind for kind, endings in _ENDINGS.items() if ending in endings), None)
    return None if packer and kind in ("parquet", "ids") else kind


def expand(names: Names, kind: SourceKind | None = None) -> list[CorpusFile]:
    """Return the files that names, folders and patterns stand for, sorted by path.

    The order of the names does not matter. A local path that exists is taken literally, brackets
    and all. In addresses ``*`` and ``**`` are patterns. Of a folder, the files are taken that have
    an ending of the kind; of a pattern all files, or those of a known kind where ``kind`` is None.
    """
    files: dict[str, CorpusFile] = {}
    for name in names:
        local = unquote(name[len("file://") :]) if name.startswith("file:///") else name
        for location in _remote(name) if is_address(local) else _local(local, kind):
            # Options of an address do not change what it names, links do not for a path.
            key = redacted(location) if is_address(location) else os.path.realpath(location)
            file = CorpusFile(location)
            rule = "a corpus file must be named once"
            remedy = "Leave one of them out: its text would count twice."
            require(key not in files, CorpusError, rule, f"{files.get(key)} and {file}", remedy)
            files[key] = file
    return sorted(files.values(), key=lambda file: _sort_key(file.location))


def _sort_key(location: str) -> str:
    return redacted(location) if is_address(location) else os.path.abspath(location)


def _absolute(name: str) -> str:
    return name if is_address(name) else os.path.abspath(name)


def _local(name: str, kind: SourceKind | None) -> list[str]:
    """Return a file, the files in a folder and below it, or those that fit a pattern."""
    if os.path.isfile(name):  # unlike Path.is_file, False for names no file can have
        return [name]
    is_folder = os.path.isdir(name)
    rule = "a corpus file must be a regular file"
    found = f"{name}, a device, pipe, socket or broken link"
    remedy = "Write the text to a file."
    require(is_folder or not os.path.lexists(name), CorpusError, rule, found, remedy)
    base, shapes = os.path.join(name, ""), ["**"]
    if not is_folder:
        sign = re.search(r"[*?[]", name)
        if sign is None:
            raise _missing(name)
        base, shapes = _cut_pattern(name, sign.start())
        if not os.path.isdir(base or "."):
            raise _missing(f"{name}, with no folder {base}")
    files: list[str] = []
    left_out = Counter[str]()
    for parts, reason in _walk(base, shapes):
        if _fits(parts, shapes):
            path = base + "/".join(parts)
            ending_fits = kind_of(path) in ((kind,) if kind else _ENDINGS)
            # A pattern whose kind is said may match any ending.
            if reason or not (ending_fits or (kind and not is_folder)):
                left_out[reason or "".join(endings_of(path)) or "without an ending"] += 1
            else:
                files.append(path)
        elif not reason and _fits([p.lower() for p in parts], [s.lower() for s in shapes]):
            left_out["written in another case"] += 1
    reasons = ", ".join(f"{n} {reason}" for reason, n in left_out.most_common(_SHOWN))
    if not files:
        raise _no_file(name, reasons)
    if reasons:  # the files of a corpus are looked for several times
        warn_once(logger, f"{name}: {left_out.total()} left out: {reasons}")
    return files


def _cut_pattern(pattern: str, at: int) -> tuple[str, list[str]]:
    """Return the folder in which all matches lie, and the parts that follow, from the first sign.

    "a/b/c*/d", whose sign is at 5 -> ("a/b/", ["c*", "d"]).
    """
    cut = pattern.rfind("/", 0, at) + 1
    return pattern[:cut], [part for part in pattern[cut:].split("/") if part]


def _fits(parts: Sequence[str], shapes: Sequence[str]) -> bool:
    """Return whether the folders and the name of a file fit a pattern; ``**`` is any folders."""
    if not shapes or not parts:
        return not parts and all(shape == "**" for shape in shapes)
    if shapes[0] == "**":
        return _fits(parts, shapes[1:]) or _fits(parts[1:], shapes)
    return fnmatchcase(parts[0], shapes[0]) and _fits(parts[1:], shapes[1:])


def _walk(base: str, shapes: Sequence[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the folders and the name of what a pattern may mean, with why it is left out, or "".

    Linked folders are followed; one that was read already, or that holds the folder, is not.
    """
    hidden = any(shape.startswith(".") for shape in shapes)
    read = {str(folder) for folder in Path(os.path.realpath(base)).parents}
    closed: list[OSError] = []
    for place, folders, names in os.walk(base or ".", onerror=closed.append, followlinks=True):
        inside = Path(place).relative_to(base or ".").parts
        if (folder := os.path.realpath(place)) in read:
            folders.clear()
            yield inside, "linked twice"
            continue
        read.add(folder)
        for name in sorted(names):
            path = os.path.join(place, name)
            if name.startswith(".") and not hidden:
                yield (*inside, name), "hidden"
            elif not os.path.isfile(path):
                yield (*inside, name), "no regular file"
            else:
                target = os.path.realpath(path)
                yield (*inside, name), "linked twice" if target in read else ""
                read.add(target)
        for name in sorted(folders):
            if name.startswith(".") and not hidden:
                yield (*inside, name), "hidden"
                folders.remove(name)
        folders.sort()
        if "**" not in shapes and len(inside) + 1 == len(shapes):
            folders.clear()
    for error in closed:
        yield Path(error.filename).relative_to(base or ".").parts, "without permission"


def _remote(name: str) -> list[str]:
    """Return an address, or those that its pattern fits."""
    address, mark, options = name.partition("?")
    file = CorpusFile(name)
    if "*" not in address:
        filesystem, path = file.resolve()
        with file.typed_errors():
            kind = filesystem.get_file_info(path).type
        rule = "an address must be that of a file"
        remedy = f"Name its files: {str(file).rstrip('/')}/*.txt"
        require(kind != fs.FileType.Directory, CorpusError, rule, str(file), remedy)
        if kind != fs.FileType.File:
            raise _missing(str(file))
        return [name]
    folder, parts = _cut_pattern(address, address.index("*"))
    filesystem, base = CorpusFile(folder.rstrip("/") + mark + options).resolve()
    deep = len(parts) > 1 or parts == ["**"]
    selector = fs.FileSelector(base, allow_not_found=True, recursive=deep)
    with file.typed_errors():
        infos = filesystem.get_file_info(selector)
    # In an address, * is the only sign of a pattern.
    shapes = [unquote(part).replace("[", "[[]").replace("?", "[?]") for part in parts]
    inside = [i.path[len(base) :].lstrip("/") for i in infos if i.type == fs.FileType.File]
    matches = [folder + quote(p) + mark + options for p in inside if _fits(p.split("/"), shapes)]
    if not matches:
        raise _no_file(str(file))
    return matches


def _missing(shown: str) -> CorpusError:
    remedy = "Check the path; a data set of the hub is named OWNER/NAME."
    return CorpusError("a corpus file must exist", shown, remedy)


def _no_file(shown: str, left_out: str = "") -> CorpusError:
    rule = "a folder or pattern must give a file of a known kind"
    remedy = f"Name files that end in {_KNOWN}, or say what others hold: --kind jsonl FOLDER/*.log."
    return CorpusError(rule, f"{shown}, with {left_out or 'nothing'}", remedy)


# Sources


# Dumped as JSON, for records and messages, addresses go without their credentials.
Paths = Annotated[
    tuple[str, ...],
    Field(
        min_length=1,
        description="Paths, folders, addresses like s3://bucket/key, or glob patterns.",
    ),
    PlainSerializer(
        lambda names: [redacted(name) for name in names], return_type=list[str], when_used="json"
    ),
]
FieldName = Annotated[str, Field(min_length=1, description="Field that holds the text.")]
MaxBad = Annotated[int, Field(ge=0, description="Unusable rows to skip before giving up.")]


class _SourceModel(BaseModel):
    """Sources; ``absolute`` is the same one with paths that a process in another folder finds."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class _Files(_SourceModel):
    kind: SourceKind
    paths: Paths

    def files(self) -> list[CorpusFile]:
        """Return the files in the order in which they are read."""
        return expand(self.paths, self.kind)

    def absolute(self) -> Self:
        return self.model_copy(update={"paths": tuple(map(_absolute, self.paths))})

    def digests(self) -> list[str]:
        """Return the SHA-256 of each file."""
        return [file.sha256() for file in self.files()]


class TextFiles(_Files):
    """Text files, one document each; ``.gz``, ``.zst``, ``.xz`` and ``.bz2`` are unpacked."""

    kind: Literal["text"] = "text"

    def pieces(self, bad: BadRows) -> Iterator[TextPiece]:
        for file in self.files():
            yield from document_of(file)


class JsonLines(_Files):
    """JSON objects, one per line or in an array; packed files are unpacked, as text files are."""

    kind: Literal["jsonl"] = "jsonl"
    field: FieldName = "text"
    max_bad: MaxBad = 0
    nul: Literal["refuse", "keep"] = "refuse"
    """What becomes of text with NUL characters, mostly damage."""

    def pieces(self, bad: BadRows) -> Iterator[TextPiece]:
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

    def pieces(self, bad: BadRows) -> Iterator[TextPiece]:
        rows = (row for file in self.files() for row in parquet_rows(file, self.field))
        return usable(rows, self.max_bad, bad)


class HubDataset(_SourceModel):
    """A string column of a Hugging Face data set, by hub id or local folder.

    A field with dots, like ``solutions.solution``, lies inside a column; each item of a list is a
    document of its own.
    """

    kind: Literal["dataset"] = "dataset"
    name: Annotated[str, Field(min_length=1)]
    """Hub id or local folder."""
    config: str | None = None
    """Configuration of the data set."""
    split: Annotated[str, Field(min_length=1)] = "train"
    """Split, slices allowed."""
    revision: str | None = None
    """Commit, to pin the data."""
    field: FieldName = "text"
    max_bad: MaxBad = 0

    @property
    def folder(self) -> Path | None:
        """The local folder, None for a data set of the hub."""
        folder = Path(self.name)
        return folder if folder.is_dir() else None

    def absolute(self) -> Self:
        name = self.name if self.folder is None else _absolute(self.name)
        return self.model_copy(update={"name": name})

    def pieces(self, bad: BadRows) -> Iterator[TextPiece]:
        rows = dataset_rows(self.name, self.config, self.split, self.revision, self.field)
        return usable(rows, self.max_bad, bad)

    def digests(self) -> list[str]:
        """Return the commit, or the digest of a local folder; a pinned commit is not asked for."""
        if self.folder is not None:
            return [directory_digest(self.folder)]
        return [hub_commit(self.name, self.revision)]


class TokenIds(_SourceModel):
    """Ready token ids: a 1-D unsigned integer ``.npy`` file, used as it is."""

    kind: Literal["ids"] = "ids"
    path: Annotated[str, Field(min_length=1)]
    """Path of the .npy file."""

    def files(self) -> list[CorpusFile]:
        return expand((self.path,), self.kind)

    def absolute(self) -> Self:
        return self.model_copy(update={"path": _absolute(self.path)})

    def digests(self) -> list[str]:
        return [file.sha256() for file in self.files()]

    def ids(self) -> Iterator[Ids]:
        """Yield the ids in chunks of at most 2^20, checked as they are read."""
        shown = str(CorpusFile(self.path))
        rule = f"{shown}: token ids must be a non-empty 1-D array of an unsigned integer type"
        remedy = "Write it to a local file with numpy.save(path, ids.ravel().astype(numpy.uint32))."
        require(not is_address(self.path), CorpusError, rule, "an address", remedy)
        try:
            array = open_array(Path(self.path))
        except ArtifactError as error:
            raise CorpusError(rule, str(error.value), remedy) from error
        right = array.ndim == 1 and array.dtype.kind == "u" and array.size > 0
        require(right, CorpusError, rule, f"shape {array.shape}, dtype {array.dtype}", remedy)
        for start in range(0, array.size, _CHUNK_IDS):
            ids = array[start : start + _CHUNK_IDS]
            check_range(ids, shown, start)
            yield ids.astype(np.int32)


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
    """Yield the documents of a source, in order, empty ones left out; there must be one."""
    parts: list[str] = []
    for text, last in not_empty(source, source.pieces(bad or BadRows())):
        parts.append(text)
        if last:
            yield "".join(parts)
            parts = []


def not_empty(source: DocumentSource, pieces: Iterable[TextPiece]) -> Iterator[TextPiece]:
    """Yield the pieces of a source, of which there must be one."""
    is_empty = True
    for piece in pieces:
        is_empty = False
        yield piece
    if is_empty:
        rule = "a corpus must hold at least one non-empty document"
        names = (source.name,) if isinstance(source, HubDataset) else source.paths
        remedy = "Check the names and, of rows, the field."
        raise CorpusError(rule, ", ".join(map(redacted, names)), remedy)


# Names and options of a command


_AS_THEY_ARE: Final = Reading()


def source_of(names: Names, reading: Reading = _AS_THEY_ARE) -> Source:
    """Return the source that names and options describe; see `sources_of`."""
    return sources_of([names], reading)[0]


def sources_of(corpora: Sequence[Names], reading: Reading = _AS_THEY_ARE) -> list[Source]:
    """Return the source of each corpus, of the kind that is given or that its names end in.

    A folder stands for the files of one kind that lie in it and below, each text file a document. A
    name like ``owner/name`` that is no file is a Hugging Face data set. An option that says nothing
    about any of the corpora is refused, and a file that is not there.
    """
    fits, given = bool(corpora) or not reading.given, ", ".join(reading.flags)
    remedy = "Name its files, or leave the options out."
    require(fits, ConfigError, "options of a corpus need one", given, remedy)
    sources = [_source(names, reading) for names in corpora]
    for flag, (name, value) in zip(reading.flags, reading.given.items(), strict=True):
        users = [kind for kind, model in _MODELS.items() if name in model.model_fields]
        rule = f"{flag} is of corpora of the kinds {', '.join(users)}"
        found = f"{value} for {', '.join(source.kind for source in sources)}"
        remedy = "Leave it out: it would have no effect."
        require(any(source.kind in users for source in sources), ConfigError, rule, found, remedy)
    return sources


def _source(names: Names, reading: Reading) -> Source:
    kind = reading.kind
    places = list(names)
    if kind != "dataset":
        places = [place for name in names for place in _places(name, kind)]
    if kind is None:
        kinds = Counter(map(_kind, places))
        rule = "a corpus must be of one kind"
        found = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "no name"
        remedy = "Name files of one kind; of a folder, --kind text (or another) takes only those."
        require(len(kinds) == 1, CorpusError, rule, found, remedy)
        (kind,) = kinds
    known = _MODELS[kind].model_fields
    fields: dict[str, object] = {n: value for n, value in reading.given.items() if n in known}
    if kind in ("ids", "dataset"):
        rule = f"a corpus of kind {kind} must be one name"
        remedy = "Check the paths: a name that is no file is taken for a data set."
        require(len(places) == 1, CorpusError, rule, ", ".join(map(redacted, places)), remedy)
        fields["name" if kind == "dataset" else "path"] = places[0]
    else:
        fields["paths"] = places
    with described("a corpus must be given as it can be read", "Correct it.", ConfigError):
        return _MODELS[kind].model_validate(fields)


def _places(name: str, kind: SourceKind | None) -> list[str]:
    """Return the files of a folder or a local pattern; a file, or a data set, as it is named."""
    maybe_dataset = kind is None and kind_of(name) is None and not glob.has_magic(name)
    if is_address(name) or os.path.isfile(name) or (maybe_dataset and not os.path.lexists(name)):
        return [name]
    return [file.location for file in expand([name], kind)]


def _kind(name: str) -> SourceKind:
    if (kind := kind_of(name)) is not None:
        return kind
    if is_address(name) or os.path.lexists(name):
        rule = (
            f"a corpus file must end in {_KNOWN}; text and JSON Lines that are packed also in "
            f"{', '.join(UNPACK)}"
        )
        remedy = "Unpack it, or say what it holds: --kind text, or jsonl, parquet, ids."
        raise CorpusError(rule, str(CorpusFile(name)), remedy)
    # A file that is missing is no data set: these have an owner on the hub, and no folder here.
    if not _HUB_ID.fullmatch(name) or os.path.isdir(name.partition("/")[0]):
        raise _missing(name)
    return "dataset"
