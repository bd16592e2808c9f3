"""Documents from text files, JSON lines, parquet and Hugging Face data sets.

Everything streams: at most one document, one parquet batch or one line is in memory. Rows are
``(place, value)`` pairs until `_usable` has checked them; `place` is what an error message names.
A UTF-8 byte order mark is stripped; line ends stay as they are (CRLF too).
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, cast

import pyarrow as pa
import pyarrow.parquet as pq

from umim_core.errors import CorpusError
from umim_core.text.sources import (
    DocumentSource,
    HubDataset,
    JsonLines,
    ParquetFiles,
    TextFiles,
    expand,
)

_BOM: Final = b"\xef\xbb\xbf"
_PARQUET_BATCH_ROWS: Final = 256
_REMEDY_ROW: Final = "Mend the row, or allow bad rows with max_bad."
_REMEDY_FILE: Final = "Mend the file or leave it out."


@dataclass
class BadRows:
    """Count of the rows that `iter_documents` skipped, and what was wrong with the first ones.

    Attributes:
        count: Rows skipped.
        first: Messages of up to 20 of them, each with file and line or row.
    """

    count: int = 0
    first: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Unreadable:
    """Stands for a row whose text could not be taken out, with the rule it breaks."""

    rule: str
    value: object


def iter_documents(source: DocumentSource, bad: BadRows | None = None) -> Iterator[str]:
    """Yield the documents of a source, in order, empty ones left out.

    Args:
        source: What to read.
        bad: Receives the count of skipped rows while the documents are consumed.

    Yields:
        Text without NUL characters or lone surrogates.

    Raises:
        CorpusError: A file is missing, torn or not of its format; more than ``max_bad`` rows are
            unusable (text files: any); or there is no text at all. The message names file and line,
            row or byte.
    """
    found = False
    for text in _documents(source, bad if bad is not None else BadRows()):
        if text:
            found = True
            yield text
    if not found:
        raise CorpusError(
            "a corpus must hold at least one non-empty document",
            source.model_dump(),
            "Check the paths and the field name.",
        )


def _documents(source: DocumentSource, bad: BadRows) -> Iterator[str]:
    if isinstance(source, TextFiles):
        return (_read_text(path) for path in expand(source.paths))
    if isinstance(source, JsonLines):
        rows = _json_rows(expand(source.paths), source.field)
    elif isinstance(source, ParquetFiles):
        rows = _parquet_rows(expand(source.paths), source.field)
    else:
        rows = _dataset_rows(source)
    return _usable(rows, source.max_bad, bad)


def _usable(rows: Iterator[tuple[str, object]], max_bad: int, bad: BadRows) -> Iterator[str]:
    """Yield the texts among the rows; count and skip up to `max_bad` others."""
    for place, value in rows:
        problem = _problem(value)
        if problem is None:
            yield cast(str, value)
            continue
        message = f"{place}: {problem.rule}"
        bad.count += 1
        if len(bad.first) < 20:
            bad.first.append(message)
        if bad.count > max_bad:
            if max_bad:
                message = f"at most {max_bad} rows may be bad, first {bad.first[0]}; {message}"
            raise CorpusError(message, problem.value, _REMEDY_ROW)


def _problem(value: object) -> _Unreadable | None:
    """Return the rule that a row breaks, or None for usable text."""
    if isinstance(value, _Unreadable):
        return value
    if not isinstance(value, str):
        return _Unreadable("the field must hold a string", value)
    if (position := value.find("\0")) >= 0:
        return _Unreadable("text must not hold NUL", f"NUL at character {position}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return _Unreadable(
            "text must not hold lone surrogates",
            f"{value[error.start]!a} at character {error.start}",
        )
    return None


def _read_text(path: Path) -> str:
    """Return the whole file as one document."""
    with _open(path) as stream, _typed_errors(path):
        data = stream.read()
    start = len(_BOM) if data.startswith(_BOM) else 0
    if (position := data.find(b"\0")) >= 0:
        raise CorpusError(
            f"{path}: text must not hold NUL", f"NUL at byte {position}", _utf8_remedy(data)
        )
    try:
        # A view: stripping the mark must not copy a file of 1 GB.
        return str(memoryview(data)[start:], "utf-8")
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{path}: text must be UTF-8",
            f"{error.reason} at byte {start + error.start}",
            _utf8_remedy(data),
        ) from error


def _utf8_remedy(data: bytes) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "The file looks like UTF-16: convert it to UTF-8."
    return "Convert the file to UTF-8, or leave it out."


def _json_rows(paths: list[Path], name: str) -> Iterator[tuple[str, object]]:
    for path in paths:
        with _open(path) as stream:
            number = 0
            while True:
                with _typed_errors(path):
                    line = stream.readline()
                if not line:
                    break
                number += 1
                if number == 1:
                    line = line.removeprefix(_BOM)
                if line.strip():
                    yield f"{path}:{number}", _json_value(line, name)


def _json_value(line: bytes, name: str) -> object:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return _Unreadable("a line must be UTF-8", f"{error.reason} at byte {error.start}")
    except (ValueError, RecursionError) as error:
        return _Unreadable(f"a line must be JSON ({error})", line[:200].decode(errors="replace"))
    if not isinstance(row, dict):
        return _Unreadable("a line must be a JSON object", row)
    if name not in row:
        return _Unreadable(f"a row must have the field {name!r}", f"fields {sorted(row)}")
    return row[name]


def _parquet_rows(paths: list[Path], name: str) -> Iterator[tuple[str, object]]:
    for path in paths:
        with _typed_errors(path), pq.ParquetFile(path) as file:
            _require_string_column(path, file.schema_arrow, name)
            row = 0
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH_ROWS, columns=[name]):
                for value in batch.column(0):
                    yield f"{path}: row {row}", _arrow_value(value)
                    row += 1


def _require_string_column(path: Path, schema: pa.Schema, name: str) -> None:
    if name not in schema.names:
        raise CorpusError(
            f"{path}: there must be a column {name!r}", f"columns {schema.names}", "Name another."
        )
    kind = schema.field(name).type
    value_kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (
        pa.types.is_string(value_kind)
        or pa.types.is_large_string(value_kind)
        or pa.types.is_string_view(value_kind)
    ):
        raise CorpusError(
            f"{path}: column {name!r} must hold strings", str(kind), "Name another column."
        )


def _arrow_value(value: pa.Scalar) -> object:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        return _Unreadable("text must be UTF-8", f"{error.reason} at byte {error.start}")


def _dataset_rows(source: HubDataset) -> Iterator[tuple[str, object]]:
    import datasets  # takes a second to import: only for those who need it

    place = f"data set {source.name!r}"
    try:
        dataset = datasets.load_dataset(
            source.name, source.config, split=source.split, revision=source.revision
        )
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        # OSError: no network, offline mode, unknown id, missing file; ValueError: unknown
        # configuration or split; RuntimeError: the data set is a script.
        raise CorpusError(
            f"{place} must be loadable (config {source.config!r}, split {source.split!r})",
            f"{type(error).__name__}: {error}",
            "Check the names; offline, name a local folder or download the data set beforehand.",
        ) from error
    if source.field not in dataset.column_names:
        raise CorpusError(
            f"{place}: there must be a column {source.field!r}",
            f"columns {dataset.column_names}",
            "Name another.",
        )
    for row, values in enumerate(dataset.select_columns([source.field])):
        yield f"{place}: row {row}", values[source.field]


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading bytes, unpacked when the name ends in ``.gz`` or ``.zst``."""
    with _typed_errors(path):
        raw = path.open("rb")
    with raw:
        if path.suffix == ".gz":
            yield cast(BinaryIO, gzip.GzipFile(fileobj=raw))
        elif path.suffix == ".zst":
            # pyarrow brings zstd; Python has it from 3.14 only.
            stream = pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd")
            yield cast(BinaryIO, io.BufferedReader(stream))
        else:
            yield raw


@contextmanager
def _typed_errors(path: Path) -> Iterator[None]:
    """Turn what the codecs and the file system raise into a `CorpusError` that names the file."""
    try:
        yield
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise CorpusError(
            f"{path}: the file must be readable and whole",
            f"{type(error).__name__}: {error}",
            _REMEDY_FILE,
        ) from error
