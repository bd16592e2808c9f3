"""Documents from text files, JSON lines and arrays, parquet and Hugging Face data sets.

Everything streams: at most one row, one parquet batch or one MiB of a text file is in memory. Rows
are ``(place, value)`` pairs until `_usable` has checked them; `place` is what an error message
names. A UTF-8 byte order mark is stripped; line ends stay as they are (CRLF too).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar, cast

import pyarrow as pa
import pyarrow.parquet as pq

from umim_core.encodable import encoding_error
from umim_core.errors import CorpusError
from umim_core.text.files import CorpusFile, typed_errors
from umim_core.text.sources import (
    DocumentSource,
    HubDataset,
    JsonLines,
    NulPolicy,
    ParquetFiles,
    Source,
    TextFiles,
    files_of,
)

T = TypeVar("T")
_BOM: Final = codecs.BOM_UTF8
_MAX_ROW: Final = 1 << 30  # bytes of a line, characters of an array's item
_PARQUET_BATCH_ROWS: Final = 256
_REMEDY_ROW: Final = "Correct it, or allow bad rows: --max-bad N, in a recipe max_bad."
_CHUNK_BYTES: Final = 1 << 20
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
_JSON: Final = json.JSONDecoder()
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_CUT_OFF: Final = len("-Infinity") + 1  # characters in which a value may be cut off
TextPiece = tuple[str, bool]  # text, and whether it ends its document


def text_parts(file: CorpusFile) -> Iterator[TextPiece]:
    """Yield a text file, which is one document, as it is decoded.

    Yields:
        (text of up to 1 MiB, whether it ends the document); nothing for a file without text.
    """
    before = ""  # one part is kept back, for the last one must be known as the last
    with file.open_unpacked() as stream:
        for text in _decoded(file, stream):
            if before:
                yield before, False
            before = text
    if before:
        yield before, True


def _decoded(file: CorpusFile, stream: BinaryIO) -> Iterator[str]:
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
            if chunk.startswith(_BOM):
                chunk, start = chunk[len(_BOM) :], len(_BOM)
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
    if looks is None:
        return "Convert the file to UTF-8, or leave it out."
    return f"The file looks {looks}."


def open_hub_dataset(name: str, config: str | None, split: str, revision: str | None = None) -> Any:
    """Open one split of a data set, by hub id or local folder, as a ``datasets.Dataset``."""
    import datasets  # takes a second to import: only for those who need it

    try:
        return datasets.load_dataset(name, config, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        pinned = "" if revision is None else f", revision {revision!r}"
        # OSError: no network, offline mode, unknown id, missing file; ValueError: unknown
        # configuration or split; RuntimeError: the data set is a script.
        raise CorpusError(
            f"data set {name!r} must be loadable (config {config!r}, split {split!r}{pinned})",
            f"{type(error).__name__}: {error}",
            "Check the names; offline, name a local folder or download the data set beforehand.",
        ) from error


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
    remedy: str = _REMEDY_ROW


def iter_documents(source: DocumentSource, bad: BadRows | None = None) -> Iterator[str]:
    """Yield the documents of a source, in order, empty ones left out.

    Yields:
        Text without lone surrogates, and without NUL characters but where they are kept.
    """
    parts: list[str] = []
    for text, last in not_empty(source, iter_parts(source, bad or BadRows())):
        parts.append(text)
        if last:
            yield "".join(parts)
            parts = []


def not_empty(source: Source, pieces: Iterable[T]) -> Iterator[T]:
    """Yield what a source gives."""
    has_text = False
    for piece in pieces:
        has_text = True
        yield piece
    if not has_text:
        raise CorpusError(
            "a corpus must hold at least one non-empty document",
            source.model_dump(mode="json"),
            "Check the paths and the field name.",
        )


def iter_parts(source: DocumentSource, bad: BadRows) -> Iterator[TextPiece]:
    """Yield the documents of a source in parts, so that none need fit in memory.

    Yields:
        (text, whether it ends its document), in order; no part is empty. A text file comes in parts
        of up to 1 MiB, a row in one part.
    """
    if isinstance(source, TextFiles):
        for file in files_of(source):
            yield from text_parts(file)
        return
    if isinstance(source, JsonLines):
        rows: Iterator[tuple[str, object]] = (
            (place, _field_of(row, source.field)) for place, row in _json_rows(files_of(source))
        )
    elif isinstance(source, ParquetFiles):
        rows = _parquet_rows(files_of(source), source.field)
    else:
        rows = _dataset_rows(source)
    nul = source.nul if isinstance(source, JsonLines) else "refuse"
    for text in _usable(rows, source.max_bad, bad, nul):
        if text:
            yield text, True


def _usable(
    rows: Iterator[tuple[str, object]], max_bad: int, bad: BadRows, nul: NulPolicy
) -> Iterator[str]:
    """Yield the texts among the rows; count and skip up to `max_bad` others."""
    for place, value in rows:
        problem = _problem(value, nul)
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
            raise CorpusError(message, problem.value, problem.remedy)


def _problem(value: object, nul: NulPolicy) -> _Unreadable | None:
    """Return the rule that a row breaks, or None for usable text."""
    if isinstance(value, _Unreadable):
        return value
    if not isinstance(value, str):
        return _Unreadable("the field must hold a string", value)
    if nul == "refuse" and (position := value.find("\0")) >= 0:
        return _Unreadable("text must not hold NUL", f"NUL at character {position}")
    if (error := encoding_error(value)) is not None:
        return _Unreadable(
            "text must not hold lone surrogates",
            f"{value[error.start]!a} at character {error.start}",
        )
    return None


def read_objects(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and object of every row of a JSON Lines file or array; no row may be bad."""
    for place, row in _json_rows([CorpusFile(str(path))]):
        if isinstance(row, _Unreadable):
            raise CorpusError(f"{place}: {row.rule}", row.value, "Correct it.")
        if not isinstance(row, dict):
            raise CorpusError(f"{place}: a row must be a JSON object", row, "Correct it.")
        yield place, row


def _json_rows(files: Sequence[CorpusFile]) -> Iterator[tuple[str, object]]:
    for file in files:
        with file.open_unpacked() as stream:
            with typed_errors(file):
                head = stream.peek(_CHUNK_BYTES)
            if any(head.startswith(magic) for magic in _HEADS):
                raise CorpusError(f"{file}: rows must be UTF-8", head[:8], _utf8_remedy(head))
            if head.removeprefix(_BOM).lstrip().startswith(b"["):
                items = _array_items(file, _decoded(file, stream))
                yield from ((f"{file}: item {number}", row) for number, row in enumerate(items, 1))
                continue
            for number, line in enumerate(_lines(file, stream), 1):
                if line.strip():
                    yield f"{file}:{number}", _json_value(line)


def _lines(file: CorpusFile, stream: BinaryIO) -> Iterator[bytes]:
    for number in count(1):
        with typed_errors(file):
            line = stream.readline(_MAX_ROW + 1)
        if not line:
            return
        if len(line) > _MAX_ROW:
            raise CorpusError(
                f"{file}:{number}: a line must be at most {_MAX_ROW} bytes",
                "more",
                "Check that the file is JSON Lines, or store its text as text files.",
            )
        yield line.removeprefix(_BOM) if number == 1 else line


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
            "Write each row on one line: jq -c . FILE." if several else _REMEDY_ROW,
        )


def _array_items(file: CorpusFile, texts: Iterator[str]) -> Iterator[object]:
    """Yield the items of a JSON array, which is read while it is parsed."""
    text, number, chunks = "", 0, 1
    while "[" not in text:
        text += next(texts)
    at = text.index("[") + 1
    while True:
        problem: Exception | None = None
        try:
            at = _space_end(text, at)
            if number == 0 and text[at : at + 1] == "]":
                break
            item, end = _JSON.raw_decode(text, at)
            end = _space_end(text, end)
            if end == len(text) or text[end] not in ",]":
                raise json.JSONDecodeError("Expecting ',' delimiter", text, end)
        except json.JSONDecodeError as error:
            cut_off = error.msg.startswith("Unterminated") or error.pos >= len(text) - _CUT_OFF
            more = "".join(islice(texts, chunks)) if cut_off else ""
            if more and len(text) - at <= _MAX_ROW:
                # Doubling: each try parses the item from its start.
                text, at, chunks = text[at:] + more, 0, 2 * chunks
                continue
            problem = error
        except (ValueError, RecursionError) as error:
            problem = error
        if problem is not None:
            raise CorpusError(
                f"{file}: item {number + 1} of the array must be whole JSON ({problem})",
                text[at : at + 200],
                "Correct the file.",
            ) from problem
        yield item
        number, chunks = number + 1, 1
        at = end + 1
        if text[end] == "]":
            break
    behind = text[at + (number == 0) :].strip()
    while not behind and (more := next(texts, "")):
        behind = more.strip()
    if behind:
        raise CorpusError(
            f"{file}: nothing may follow a JSON array", behind[:200], "Write one per file."
        )


def _space_end(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _field_of(row: object, name: str) -> object:
    if isinstance(row, _Unreadable):
        return row
    if not isinstance(row, dict):
        return _Unreadable("a row must be a JSON object", row)
    if name in row:
        return row[name]
    fields = f"fields {sorted(row)}"
    lists = [key for key, value in row.items() if isinstance(value, list)]
    if len(lists) == 1 and row[lists[0]] and isinstance(row[lists[0]][0], dict):
        remedy = f"Write the rows of {lists[0]!r} on lines: jq -c '.[{json.dumps(lists[0])}][]'."
        return _Unreadable(f"a row must have the field {name!r}", fields, remedy)
    return _Unreadable(f"a row must have the field {name!r}", fields)


def _parquet_rows(files: Sequence[CorpusFile], name: str) -> Iterator[tuple[str, object]]:
    for file in files:
        with file.open_random() as stream, typed_errors(file), pq.ParquetFile(stream) as table:
            _require_string_column(file, table.schema_arrow, name)
            row = 0
            for batch in table.iter_batches(batch_size=_PARQUET_BATCH_ROWS, columns=[name]):
                for value in batch.column(0):
                    yield f"{file}: row {row}", _arrow_value(value)
                    row += 1


def _require_string_column(file: CorpusFile, schema: pa.Schema, name: str) -> None:
    if name not in schema.names:
        raise CorpusError(
            f"{file}: there must be a column {name!r}", f"columns {schema.names}", "Name another."
        )
    kind = schema.field(name).type
    value_kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (
        pa.types.is_string(value_kind)
        or pa.types.is_large_string(value_kind)
        or pa.types.is_string_view(value_kind)
    ):
        raise CorpusError(
            f"{file}: column {name!r} must hold strings", str(kind), "Name another column."
        )


def _arrow_value(value: pa.Scalar) -> object:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        return _Unreadable("text must be UTF-8", f"{error.reason} at byte {error.start}")


def _dataset_rows(source: HubDataset) -> Iterator[tuple[str, object]]:
    place = f"data set {source.name!r}"
    dataset = open_hub_dataset(source.name, source.config, source.split, source.revision)
    whole = source.field in dataset.column_names  # a column's own name may hold dots
    column, *inner = [source.field] if whole else source.field.split(".")
    if column not in dataset.column_names:
        raise CorpusError(
            f"{place}: there must be a column {column!r}",
            f"columns {dataset.column_names}",
            "Name another.",
        )
    for row, values in enumerate(dataset.select_columns([column])):
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
