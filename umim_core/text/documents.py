"""Documents in the files of a corpus and in data sets: read, checked, and counted where bad.

Everything streams, but for JSON arrays: at most one row, one parquet batch or one MiB of a text
file is in memory. Rows are ``(place, value)`` pairs until `usable` has checked them; `place` is
what an error message names, and a row whose text could not be taken out has its error for a value.
A UTF-8 byte order mark is stripped; line ends stay as they are (CRLF too).
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any, BinaryIO, Final, cast

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from umim_core.addresses import beside, check_path, is_address, redacted, scrubbed, without_options
from umim_core.encodable import encoding_error
from umim_core.errors import CorpusError, require

TextPiece = tuple[str, bool]  # text, and whether it ends its document
PlacedRows = Iterator[tuple[str, object]]  # where a row stands, and what stands for its text
_MAX_ROW: Final = 1 << 30  # bytes of a line or of an array
_PARQUET_BATCH_ROWS: Final = 256
_CHUNK_BYTES: Final = 1 << 20
_OTHER_FIELD: Final = "Name another (--field NAME, in a recipe field)."
_CORRECT_ROW: Final = "Correct it, or allow bad rows (--max-bad N, in a recipe max_bad)."
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
UNPACK: Final[dict[str, Callable[[Any], Any]]] = {
    ".gz": gzip.open,
    # pyarrow brings zstd; Python has it from 3.14 only.
    ".zst": lambda raw: pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd"),
    ".xz": lzma.open,
    ".bz2": bz2.open,
}
_READ_AHEAD: Final = 1 << 22  # bytes of one request to a remote file
_HUB_SECONDS: Final = 10.0
# What begins like an array, or an object whose first line does not end it: with { [ : or 1, say.
_WHOLE_VALUE: Final = re.compile(rb"\s*(\[|\{([^\n]*([{\[:]|[^}\s]\s*,))?\s*\n)")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_SWITCHING: Final = Lock()  # datasets has one switch for the whole process


@dataclass
class BadRows:
    """Rows that were skipped, and the message of the first one, with file and row."""

    count: int = 0
    first: str = ""

    def add(self, count: int, message: str) -> None:
        self.count += count
        self.first = self.first or message


# Files


@dataclass(frozen=True)
class CorpusFile:
    """One file of a corpus; shown as its path, or its address without credentials and options."""

    location: str = field(repr=False)

    def __str__(self) -> str:
        return redacted(without_options(self.location))

    def sha256(self) -> str:
        """Return the SHA-256 of the content in hex, read in chunks."""
        with self.open() as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    @contextmanager
    def open(self) -> Iterator[io.BufferedReader]:
        """Open the stored bytes; what goes wrong within, too, names the file."""
        with self.typed_errors():
            if is_address(self.location):
                filesystem, path = self.resolve()
                raw = io.BufferedReader(filesystem.open_input_file(path), _READ_AHEAD)
            else:
                raw = Path(self.location).open("rb")  # noqa: SIM115  closed below
            with raw:
                yield raw

    @contextmanager
    def open_unpacked(self) -> Iterator[io.BufferedReader]:
        """Open the file for reading, unpacked where its name ends as packed ones do."""
        packer = endings_of(self.location)[1]
        with self.open() as raw:
            yield io.BufferedReader(UNPACK[packer](raw)) if packer else raw

    def resolve(self) -> tuple[fs.FileSystem, str]:
        """Return the file system of an address and the path in it."""
        rule = "the address must be one that Arrow's file systems know"
        remedy = "Write it like s3://bucket/path?region=eu-west-1; quote odd characters with %."
        with self.typed_errors(rule, remedy):
            filesystem, path = fs.FileSystem.from_uri(self.location)
        return filesystem, path

    @contextmanager
    def typed_errors(
        self,
        rule: str = "the file must be readable and whole",
        remedy: str = "Correct the file or leave it out.",
    ) -> Iterator[None]:
        """Turn what codecs and file systems raise into a `CorpusError` that names the file."""
        try:
            yield
        except (OSError, EOFError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
            found = f"{type(error).__name__}: {scrubbed(str(error), self.location)}"
            cause = None if is_address(self.location) else error  # it may show credentials
            raise CorpusError(f"{self}: {rule}", found, remedy) from cause


def endings_of(name: str) -> tuple[str, str]:
    """Return the ending that tells the kind and that of the packer, in lower case; "" for none.

    "A.JSONL.gz" -> (".jsonl", ".gz"), "notes" -> ("", "").
    """
    path = PurePosixPath(without_options(name).lower())
    packer = path.suffix if path.suffix in UNPACK else ""
    return PurePosixPath(path.name.removesuffix(packer)).suffix, packer


# Text


def document_of(file: CorpusFile) -> Iterator[TextPiece]:
    """Yield a text file as one document; an empty one is none."""
    has_text = False
    with file.open_unpacked() as stream:
        for text in decoded(file, stream):
            has_text = True
            yield text, False
    if has_text:
        yield "", True


def decoded(file: CorpusFile, stream: BinaryIO) -> Iterator[str]:
    """Yield UTF-8 text in parts of up to 1 MiB, without a byte order mark in front."""
    decoder, head, read = codecs.getincrementaldecoder("utf-8")(), b"", 0
    while True:
        chunk = stream.read(_CHUNK_BYTES)
        head, read = head or chunk[:8], read + len(chunk)
        if (at := chunk.find(b"\0")) >= 0:
            found = f"NUL at byte {read - len(chunk) + at}"
            raise CorpusError(f"{file}: text must not hold NUL", found, _utf8_remedy(head))
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            found = f"{error.reason} at byte {read - len(error.object) + error.start}"
            rule = f"{file}: text must be UTF-8"
            raise CorpusError(rule, found, _utf8_remedy(head)) from error
        if read == len(chunk):
            text = text.removeprefix("\ufeff")
        if text:
            yield text
        if not chunk:
            return


def _utf8_remedy(head: bytes) -> str:
    looks = next((looks for magic, looks in _HEADS.items() if head.startswith(magic)), None)
    return f"The file looks {looks}." if looks else "Convert the file to UTF-8, or leave it out."


# Rows


def usable(
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
        bad.add(1, message)
        if bad.count > max_bad:
            if max_bad:
                message = f"at most {max_bad} rows may be bad, first {bad.first}; {message}"
            raise CorpusError(message, problem.value, problem.remedy)


def _problem(value: object, keep_nul: bool) -> CorpusError | None:
    """Return the rule that a row breaks, or None for usable text."""
    if isinstance(value, CorpusError):
        return value
    if not isinstance(value, str):
        return _bad("the field must hold a string", value)
    if not keep_nul and (position := value.find("\0")) >= 0:
        return _bad("text must not hold NUL", f"NUL at character {position}")
    if (found := encoding_error(value)) is not None:
        return _bad("text must not hold lone surrogates", found)
    return None


def _bad(rule: str, value: object, remedy: str = _CORRECT_ROW) -> CorpusError:
    return CorpusError(rule, value, remedy)


def read_objects(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and object of every row of a JSON Lines file or array; no row may be bad."""
    for place, row in json_rows(CorpusFile(str(path))):
        if isinstance(row, CorpusError):
            raise CorpusError(f"{place}: {row.rule}", row.value, "Correct it.")
        if not isinstance(row, dict):
            raise CorpusError(f"{place}: a row must be a JSON object", row, "Correct it.")
        yield place, row


def json_rows(file: CorpusFile) -> PlacedRows:
    """Yield the lines of JSON Lines that are not empty, or the items of an array.

    A file whose first line begins an object that goes on is one row, printed over several lines.
    """
    shown = str(file)  # once: it takes as long as reading a row
    with file.open_unpacked() as stream:
        head = stream.peek(_CHUNK_BYTES)
        if magic := next(filter(head.startswith, _HEADS), None):  # all else may be secret
            raise CorpusError(f"{shown}: rows must be UTF-8", magic, _utf8_remedy(head))
        if _is_whole(head.removeprefix(codecs.BOM_UTF8)):
            for number, row in enumerate(_whole(file, stream), 1):
                yield f"{shown}: item {number}", row
            return
        for number in count(1):
            line = stream.readline(_MAX_ROW + 1)
            if len(line) > _MAX_ROW:
                rule = f"{shown}:{number}: a line must be at most {_MAX_ROW} bytes"
                remedy = "Check that the file is JSON Lines, or store its text as text files."
                raise CorpusError(rule, "more", remedy)
            if not line:
                return
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield f"{shown}:{number}", _json_value(line)


def _is_whole(head: bytes) -> bool:
    """Return whether a file begins like one value over several lines, not like a torn first row.

    Behind a torn row stands a whole one, and no bracket that closes what it stands in.
    """
    if not _WHOLE_VALUE.match(head):
        return False
    lines = [line for line in head.splitlines() if line.strip()]
    second, third = [*lines[1:3], b"", b""][:2]
    torn = isinstance(_json_value(second), dict) and third.lstrip()[:1] in (b"", b"{")
    return head.lstrip()[:1] == b"[" or not torn


def _json_value(line: bytes) -> object:
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        return _bad("a line must be UTF-8", f"{error.reason} at byte {error.start}")
    except (ValueError, RecursionError) as error:
        found = line[:200].strip().decode(errors="replace")
        return _bad(f"a line must be JSON ({error})", found)


def _whole(file: CorpusFile, stream: BinaryIO) -> list[object]:
    texts: list[str] = []
    size = 0
    for text in decoded(file, stream):
        texts.append(text)
        size += len(text)
        rule = f"{file}: an array must be at most {_MAX_ROW} characters"
        remedy = "Write its rows on lines: jq -c '.[]' FILE."
        require(size <= _MAX_ROW, CorpusError, rule, "more", remedy)
    try:
        value = json.loads("".join(texts))
    except (ValueError, RecursionError) as error:
        rule = f"{file}: a file that begins with [ or a part of a row must be one whole JSON value"
        remedy = "Correct the file, or write each row on one line: jq -c . FILE."
        raise CorpusError(rule, str(error), remedy) from error
    return value if isinstance(value, list) else [value]


def field_of(row: object, name: str) -> object:
    if isinstance(row, CorpusError):
        return row
    if not isinstance(row, dict):
        return _bad("a row must be a JSON object", row)
    if name in row:
        return row[name]
    remedy = "Name another (--field NAME, in a recipe field), or allow bad rows (--max-bad N)."
    lists = [key for key, value in row.items() if isinstance(value, list)]
    if len(lists) == 1 and row[lists[0]] and isinstance(row[lists[0]][0], dict):
        remedy = f"Write the rows of {lists[0]!r} on lines: jq -c '.[{json.dumps(lists[0])}][]'."
    return _bad(f"a row must have the field {name!r}", f"fields {sorted(row)}", remedy)


def parquet_rows(file: CorpusFile, name: str) -> PlacedRows:
    shown = str(file)
    with file.open() as stream, pq.ParquetFile(stream) as table:
        schema = table.schema_arrow
        _require_column(shown, name, schema.names)
        kind = schema.field(name).type
        texts = kind.value_type if pa.types.is_dictionary(kind) else kind
        rule = f"{shown}: column {name!r} must hold strings"
        fits = texts in (pa.string(), pa.large_string(), pa.string_view())
        require(fits, CorpusError, rule, str(kind), "Name another column.")
        row = 0
        for batch in table.iter_batches(batch_size=_PARQUET_BATCH_ROWS, columns=[name]):
            for value in batch.column(0):
                yield f"{shown}: row {row}", _arrow_value(value)
                row += 1


def _require_column(place: str, name: str, columns: Sequence[str]) -> None:
    rule = f"{place}: there must be a column {name!r}"
    require(name in columns, CorpusError, rule, f"columns {columns}", _OTHER_FIELD)


def _arrow_value(value: pa.Scalar) -> object:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        return _bad("text must be UTF-8", f"{error.reason} at byte {error.start}")


def dataset_rows(
    name: str, config: str | None, split: str, revision: str | None, column: str
) -> PlacedRows:
    check_path("data set", name, CorpusError)
    import datasets  # takes a second to import: only for those who need it

    place, silence = f"data set {name!r}", None
    with _SWITCHING:
        offline = datasets.config.HF_HUB_OFFLINE
        try:
            if not (offline or os.path.isdir(name)):
                hub_commit(name, revision)
        except CorpusError as error:  # the library would ask five times more; it may have a copy
            silence, datasets.config.HF_HUB_OFFLINE = error.__cause__, True
        try:
            table: Any = datasets.load_dataset(name, config, split=split, revision=revision)
        # OSError: no network, offline mode, unknown id, missing file; ValueError: unknown
        # configuration or split; RuntimeError: the data set is a script.
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            pinned = "" if revision is None else f", revision {revision!r}"
            remedy = "Check the names; offline, name a local folder or download it beforehand."
            raise CorpusError(
                f"{place} must be loadable (config {config!r}, split {split!r}{pinned})",
                f"{type(silence or error).__name__}: {silence or error}",
                beside(name) or remedy,
            ) from error
        finally:
            datasets.config.HF_HUB_OFFLINE = offline
    inner: list[str] = []
    if column not in table.column_names:  # a column's own name may hold dots
        column, *inner = column.split(".")
    _require_column(place, column, table.column_names)
    for row, values in enumerate(table.select_columns([column])):
        for value in _inside(values[column], inner) if inner else (values[column],):
            yield f"{place}: row {row}", value


def hub_commit(name: str, revision: str | None) -> str:
    """Return the commit of a data set of the hub, which has some seconds to answer.

    A pinned one is not asked for.
    """
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi  # takes half a second to import
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: no answer, too
        HFValidationError,
        HTTPError,
    )

    try:
        return str(HfApi().dataset_info(name, revision=revision, timeout=_HUB_SECONDS).sha)
    except (OSError, HTTPError, HFValidationError) as error:
        # A tag or a branch may move: a key made of its name would fit other data later.
        pinned = "" if revision is None else f" at revision {revision}"
        rule = "a data set must be reachable, or pinned by a commit of 40 hex digits"
        remedy = "Name the commit as its revision, or a local folder."
        raise CorpusError(rule, f"{name}{pinned}", remedy) from error


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
        yield _bad(f"a row must have the field {path[0]!r}", value)
