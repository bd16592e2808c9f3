"""Corpus files: local paths, and addresses of the file systems Arrow knows (S3, GCS, HDFS ...).

An address is ``scheme://place/path?options``; Arrow reads the options, for S3 for example
``?region=eu-west-1&endpoint_override=127.0.0.1:9000&scheme=http``. Addresses may carry credentials,
so a file is shown without them: ``str(file)`` is safe in messages, ``file.location`` is not.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final, cast
from urllib.parse import quote, unquote

import pyarrow as pa
from pyarrow import fs

from umim_core.addresses import is_address, redacted, scrubbed, without_options
from umim_core.errors import CorpusError

_READ_AHEAD: Final = 1 << 22  # bytes of one request to a remote file


@dataclass(frozen=True)
class CorpusFile:
    """One file of a corpus; shown as its path, or its address without credentials and options."""

    location: str = field(repr=False)

    def __str__(self) -> str:
        return redacted(without_options(self.location))

    @property
    def suffix(self) -> str:
        """The ending of the name, ``.gz`` for example."""
        return PurePosixPath(without_options(self.location)).suffix

    @property
    def size(self) -> int:
        """Bytes of the file as it is stored."""
        with typed_errors(self):
            if not is_address(self.location):
                return os.path.getsize(self.location)
            filesystem, path = _resolve(self.location)
            return int(filesystem.get_file_info(path).size or 0)

    def sha256(self) -> str:
        """Return the SHA-256 of the content in hex, read in chunks."""
        with self.open() as stream, typed_errors(self):
            return hashlib.file_digest(stream, "sha256").hexdigest()

    @contextmanager
    def open(self) -> Iterator[io.BufferedReader]:
        """Open the stored bytes for reading from start to end."""
        with typed_errors(self):
            if is_address(self.location):
                filesystem, path = _resolve(self.location)
                source = filesystem.open_input_stream(path, compression=None)
                raw = io.BufferedReader(source, _READ_AHEAD)
            else:
                raw = Path(self.location).open("rb")  # noqa: SIM115  closed below
        with raw:
            yield raw

    @contextmanager
    def open_unpacked(self) -> Iterator[BinaryIO]:
        """Open the file for reading, unpacked when its name ends in ``.gz`` or ``.zst``."""
        with self.open() as raw:
            if self.suffix == ".gz":
                yield cast(BinaryIO, gzip.GzipFile(fileobj=raw))
            elif self.suffix == ".zst":
                # pyarrow brings zstd; Python has it from 3.14 only.
                stream = pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd")
                yield cast(BinaryIO, io.BufferedReader(stream))
            else:
                yield raw

    @contextmanager
    def open_random(self) -> Iterator[pa.NativeFile]:
        """Open the stored bytes for reading at any place, as parquet needs it."""
        with typed_errors(self):
            if is_address(self.location):
                filesystem, path = _resolve(self.location)
                stream = filesystem.open_input_file(path)
            else:
                stream = pa.OSFile(self.location)
        with stream:
            yield stream


@contextmanager
def typed_errors(file: CorpusFile) -> Iterator[None]:
    """Turn what codecs and file systems raise into a `CorpusError` that names the file."""
    try:
        yield
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise CorpusError(
            f"{file}: the file must be readable and whole",
            f"{type(error).__name__}: {scrubbed(str(error), file.location)}",
            "Correct the file or leave it out.",
        ) from (None if is_address(file.location) else error)  # the cause may show credentials


def expand(names: tuple[str, ...]) -> list[CorpusFile]:
    """Return the files that names and patterns stand for, sorted by path.

    The order of the names does not matter. A local path that exists is taken literally, brackets
    and all. In addresses ``*`` and ``**`` are patterns.
    """
    files: dict[tuple[str, str], CorpusFile] = {}
    for name in names:
        local = unquote(name[len("file://") :]) if name.startswith("file:///") else name
        for location in _remote(name) if is_address(local) else _local(local):
            file = CorpusFile(location)
            key = _identity(location)
            if key in files:
                raise CorpusError(
                    "a corpus file must be named once",
                    f"{files[key]} and {file}",
                    "Leave one of them out: its text would count twice.",
                )
            files[key] = file
    return sorted(files.values(), key=lambda file: _sort_key(file.location))


def _identity(location: str) -> tuple[str, str]:
    if is_address(location):
        return "address", redacted(location)
    return "path", os.path.realpath(location)


def _sort_key(location: str) -> str:
    return redacted(location) if is_address(location) else os.path.abspath(location)


def _local(name: str) -> list[str]:
    if os.path.isfile(name):  # unlike Path.is_file, False for names no file can have
        return [name]
    if os.path.isdir(name):
        raise _is_folder(name)
    matches = [match for match in glob.glob(name, recursive=True) if os.path.isfile(match)]
    return matches or _nothing(name, pattern=glob.has_magic(name))


def _remote(name: str) -> list[str]:
    address, mark, options = name.partition("?")
    file = CorpusFile(name)
    if "*" not in address:
        filesystem, path = _resolve(name)
        with typed_errors(file):
            kind = filesystem.get_file_info(path).type
        if kind == fs.FileType.Directory:
            raise _is_folder(str(file))
        return [name] if kind == fs.FileType.File else _nothing(str(file), pattern=False)
    folder = address[: address.index("*")].rpartition("/")[0]
    pattern = address[len(folder) + 1 :]
    filesystem, base = _resolve(folder + mark + options)
    selector = fs.FileSelector(base, allow_not_found=True, recursive="/" in pattern)
    with typed_errors(file):
        infos = filesystem.get_file_info(selector)
    shape = _pattern(unquote(pattern))
    inside = [i.path[len(base) :].lstrip("/") for i in infos if i.type == fs.FileType.File]
    matches = [f"{folder}/{quote(p)}{mark}{options}" for p in inside if shape.fullmatch(p)]
    return matches or _nothing(str(file), pattern=True)


def _pattern(text: str) -> re.Pattern[str]:
    """Translate ``*`` (within a folder) and ``**/`` (any folders) to a regular expression."""
    parts = re.split(r"(\*\*/|\*)", text)
    shapes = {"**/": "(?:.*/)?", "*": "[^/]*"}
    return re.compile("".join(shapes.get(part, re.escape(part)) for part in parts))


def _nothing(shown: str, *, pattern: bool) -> list[str]:
    if pattern:
        raise CorpusError("a pattern must match a file", shown, "Check the folder and quoting.")
    raise CorpusError("a corpus file must exist", shown, "Check the path.")


def _is_folder(shown: str) -> CorpusError:
    return CorpusError(
        "a corpus path must be a file", shown, f"Name its files: {shown.rstrip('/')}/*.txt"
    )


def _resolve(location: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of an address and the path in it."""
    try:
        filesystem, path = fs.FileSystem.from_uri(location)
    except (OSError, pa.ArrowException) as error:
        raise CorpusError(
            f"{CorpusFile(location)}: the address must be one that Arrow's file systems know",
            f"{type(error).__name__}: {scrubbed(str(error), location)}",
            "Write it like s3://bucket/path?region=eu-west-1; quote odd characters with %.",
        ) from None  # the cause may show credentials
    return filesystem, path
