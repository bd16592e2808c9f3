"""Sources of a corpus: what a user names, and the documents that it holds.

Names and options become one of five kinds of source (`source_of`); a source lists its files, says
their digests, and gives its documents in parts::

    ("books", "a.txt")  ->  TextFiles(paths=...)  ->  books/1.txt, books/2.txt, a.txt  ->  documents

Everything streams, but for JSON arrays: at most one row, one parquet batch or one MiB of a text
file is in memory. Rows are ``(place, value)`` pairs until `_usable` has checked them; `place` is
what an error message names. A UTF-8 byte order mark is stripped; line ends stay as they are (CRLF
too).
"""

from __future__ import annotations

import codecs
import glob
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Literal, TypeVar, cast

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer

from umim_core.addresses import is_address, redacted
from umim_core.encodable import encoding_error
from umim_core.errors import ConfigError, CorpusError, require
from umim_core.store.artifacts import described, directory_digest
from umim_core.text.files import (
    CorpusFile,
    SourceKind,
    expand,
    kind_of,
    typed_errors,
    unknown_kind,
)

T = TypeVar("T")
TextPiece = tuple[str, bool]  # text, and whether it ends its document
PlacedRows = Iterator[tuple[str, object]]  # where a row stands, and what stands for its text
_MAX_ROW: Final = 1 << 30  # bytes of a line or of an array
_PARQUET_BATCH_ROWS: Final = 256
_CHUNK_BYTES: Final = 1 << 20
_TOLD: Final = 20  # bad rows whose messages are kept
_CORRECT_ROW: Final = "Correct it, or allow bad rows: --max-bad N, in a recipe max_bad."
_HEADS: Final = {
    codecs.BOM_UTF16_LE: "like UTF-16: convert it to UTF-8",
    codecs.BOM_UTF16_BE: "like UTF-16: convert it to UTF-8",
    b"\x1f\x8b": "packed by gzip: let its name end in .gz",
    b"\x28\xb5\x2f\xfd": "packed by zstd: let its name end in .zst",
    b"\xfd7zXZ": "packed by xz: let its name end in .xz",
    b"BZh": "packed by bzip2: let its name end in .bz2",
    b"PK\x03\x04": "packed by zip: unpack it",
    b"PAR1": "like parquet: let its name end in .parquet",
    b"\x93NUMPY": "like an array: let its name end in .npy",
    b"%PDF": "like PDF: take the text out of it",
}
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_HUB_ID: Final = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


# Kinds


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


@dataclass
class BadRows:
    """Rows that were skipped, and the messages of the first ones, each with file and row."""

    count: int = 0
    first: list[str] = field(default_factory=list)


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
            (place, _field_of(row, self.field))
            for file in self.files()
            for place, row in json_rows(file)
        )
        return _usable(rows, self.max_bad, bad, keep_nul=self.nul == "keep")


class ParquetFiles(_Files):
    """A string column of parquet files."""

    kind: Literal["parquet"] = "parquet"
    field: FieldName = "text"
    max_bad: MaxBad = 0

    def parts(self, bad: BadRows) -> Iterator[TextPiece]:
        rows = (row for file in self.files() for row in _parquet_rows(file, self.field))
        return _usable(rows, self.max_bad, bad)


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
        return _usable(_dataset_rows(self), self.max_bad, bad)

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


# Names


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
    elif kind == "ids":
        fields["path"] = places[0]
    else:
        fields["paths"] = places
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


# Documents


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


def decoded(file: CorpusFile, stream: BinaryIO) -> Iterator[str]:
    """Yield UTF-8 text in parts of up to 1 MiB, without a byte order mark in front."""
    head = rest = b""
    start = 0  # of `rest` in the file, bytes
    final = False
    while not final:
        with typed_errors(file):
            chunk = stream.read(_CHUNK_BYTES)
        final = not chunk
        if not head:
            head = chunk[:8]
            if chunk.startswith(codecs.BOM_UTF8):
                chunk, start = chunk.removeprefix(codecs.BOM_UTF8), len(codecs.BOM_UTF8)
        data = rest + chunk
        if (position := data.find(b"\0")) >= 0:
            raise CorpusError(
                f"{file}: text must not hold NUL",
                f"NUL at byte {start + position}",
                _utf8_remedy(head),
            )
        try:
            text, used = codecs.utf_8_decode(data, "strict", final)
        except UnicodeDecodeError as error:
            raise CorpusError(
                f"{file}: text must be UTF-8",
                f"{error.reason} at byte {start + error.start}",
                _utf8_remedy(head),
            ) from error
        rest = data[used:]
        start += used
        if text:
            yield text


def _utf8_remedy(head: bytes) -> str:
    looks = next((looks for magic, looks in _HEADS.items() if head.startswith(magic)), None)
    return f"The file looks {looks}." if looks else "Convert the file to UTF-8, or leave it out."


# Rows


@dataclass(frozen=True)
class _Unreadable:
    """Stands for a row whose text could not be taken out, with the rule it breaks."""

    rule: str
    value: object
    remedy: str = _CORRECT_ROW


def _usable(
    rows: PlacedRows, max_bad: int, bad: BadRows, *, keep_nul: bool = False
) -> Iterator[TextPiece]:
    """Yield the texts among the rows, but empty ones; count and skip up to `max_bad` others."""
    for place, value in rows:
        problem = _problem(value, keep_nul)
        if problem is None:
            if value:
                yield cast(str, value), True
            continue
        message = f"{place}: {problem.rule}"
        bad.count += 1
        if len(bad.first) < _TOLD:
            bad.first.append(message)
        if bad.count > max_bad:
            if max_bad:
                message = f"at most {max_bad} rows may be bad, first {bad.first[0]}; {message}"
            raise CorpusError(message, problem.value, problem.remedy)


def _problem(value: object, keep_nul: bool) -> _Unreadable | None:
    """Return the rule that a row breaks, or None for usable text."""
    if isinstance(value, _Unreadable):
        return value
    if not isinstance(value, str):
        return _Unreadable("the field must hold a string", value)
    if not keep_nul and (position := value.find("\0")) >= 0:
        return _Unreadable("text must not hold NUL", f"NUL at character {position}")
    if (error := encoding_error(value)) is not None:
        return _Unreadable(
            "text must not hold lone surrogates",
            f"{value[error.start]!a} at character {error.start}",
        )
    return None


def read_objects(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and object of every row of a JSON Lines file or array; no row may be bad."""
    for place, row in json_rows(CorpusFile(str(path))):
        if isinstance(row, _Unreadable):
            raise CorpusError(f"{place}: {row.rule}", row.value, "Correct it.")
        if not isinstance(row, dict):
            raise CorpusError(f"{place}: a row must be a JSON object", row, "Correct it.")
        yield place, row


def json_rows(file: CorpusFile) -> PlacedRows:
    with file.open_unpacked() as stream:
        with typed_errors(file):
            head = stream.peek(_CHUNK_BYTES)
        if any(head.startswith(magic) for magic in _HEADS):
            raise CorpusError(f"{file}: rows must be UTF-8", head[:8], _utf8_remedy(head))
        if head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            for number, row in enumerate(_array(file, stream), 1):
                yield f"{file}: item {number}", row
            return
        for number in count(1):
            with typed_errors(file):
                line = stream.readline(_MAX_ROW + 1)
            require(
                len(line) <= _MAX_ROW,
                CorpusError,
                f"{file}:{number}: a line must be at most {_MAX_ROW} bytes",
                "more",
                "Check that the file is JSON Lines, or store its text as text files.",
            )
            if not line:
                return
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield f"{file}:{number}", _json_value(line)


def _json_value(line: bytes) -> object:
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        return _Unreadable("a line must be UTF-8", f"{error.reason} at byte {error.start}")
    except (ValueError, RecursionError) as error:
        several = line.strip() == b"{"  # the first line of a value that is printed over several
        return _Unreadable(
            f"a line must be JSON ({error})",
            line[:200].strip().decode(errors="replace"),
            "Write each row on one line: jq -c . FILE." if several else _CORRECT_ROW,
        )


def _array(file: CorpusFile, stream: BinaryIO) -> list[object]:
    texts: list[str] = []
    size = 0
    for text in decoded(file, stream):
        texts.append(text)
        size += len(text)
        require(
            size <= _MAX_ROW,
            CorpusError,
            f"{file}: an array must be at most {_MAX_ROW} characters",
            "more",
            "Write its rows on lines: jq -c '.[]' FILE.",
        )
    try:
        return cast("list[object]", json.loads("".join(texts)))
    except (ValueError, RecursionError) as error:
        raise CorpusError(
            f"{file}: a file that begins with [ must be one whole JSON array",
            str(error),
            "Correct the file, or write one object per line.",
        ) from error


def _field_of(row: object, name: str) -> object:
    if isinstance(row, _Unreadable):
        return row
    if not isinstance(row, dict):
        return _Unreadable("a row must be a JSON object", row)
    if name in row:
        return row[name]
    remedy = _CORRECT_ROW
    lists = [key for key, value in row.items() if isinstance(value, list)]
    if len(lists) == 1 and row[lists[0]] and isinstance(row[lists[0]][0], dict):
        remedy = f"Write the rows of {lists[0]!r} on lines: jq -c '.[{json.dumps(lists[0])}][]'."
    return _Unreadable(f"a row must have the field {name!r}", f"fields {sorted(row)}", remedy)


def _parquet_rows(file: CorpusFile, name: str) -> PlacedRows:
    with file.open_random() as stream, typed_errors(file), pq.ParquetFile(stream) as table:
        schema = table.schema_arrow
        _require_column(str(file), name, schema.names)
        kind = schema.field(name).type
        texts = kind.value_type if pa.types.is_dictionary(kind) else kind
        require(
            texts in (pa.string(), pa.large_string(), pa.string_view()),
            CorpusError,
            f"{file}: column {name!r} must hold strings",
            str(kind),
            "Name another column.",
        )
        row = 0
        for batch in table.iter_batches(batch_size=_PARQUET_BATCH_ROWS, columns=[name]):
            for value in batch.column(0):
                yield f"{file}: row {row}", _arrow_value(value)
                row += 1


def _require_column(place: str, name: str, columns: Sequence[str]) -> None:
    require(
        name in columns,
        CorpusError,
        f"{place}: there must be a column {name!r}",
        f"columns {columns}",
        "Name another.",
    )


def _arrow_value(value: pa.Scalar) -> object:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        return _Unreadable("text must be UTF-8", f"{error.reason} at byte {error.start}")


def _dataset_rows(source: HubDataset) -> PlacedRows:
    import datasets  # takes a second to import: only for those who need it

    place = f"data set {source.name!r}"
    try:
        table: Any = datasets.load_dataset(
            source.name, source.config, split=source.split, revision=source.revision
        )
    # OSError: no network, offline mode, unknown id, missing file; ValueError: unknown configuration
    # or split; RuntimeError: the data set is a script.
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        pinned = "" if source.revision is None else f", revision {source.revision!r}"
        raise CorpusError(
            f"{place} must be loadable (config {source.config!r}, split {source.split!r}{pinned})",
            f"{type(error).__name__}: {error}",
            "Check the names; offline, name a local folder or download the data set beforehand.",
        ) from error
    whole = source.field in table.column_names  # a column's own name may hold dots
    column, *inner = [source.field] if whole else source.field.split(".")
    _require_column(place, column, table.column_names)
    for row, values in enumerate(table.select_columns([column])):
        for value in _inside(values[column], inner) if inner else (values[column],):
            yield f"{place}: row {row}", value


def _inside(value: object, path: Sequence[str]) -> Iterator[object]:
    """Yield what a path of field names leads to, item by item where a list lies on it."""
    if isinstance(value, list):
        for item in value:
            yield from _inside(item, path)
    elif not path:
        yield value
    elif isinstance(value, dict) and path[0] in value:
        yield from _inside(value[path[0]], path[1:])
    else:
        yield _Unreadable(f"a row must have the field {path[0]!r}", value)
