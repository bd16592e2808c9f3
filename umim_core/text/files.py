"""Corpus files: what names stand for, and how they are opened.

A name is a local path, a folder, a pattern, or an address of a file system that Arrow knows: S3,
GCS, HDFS ... An address is ``scheme://place/path?options``; Arrow reads the options, for S3 for
example ``?region=eu-west-1&endpoint_override=127.0.0.1:9000&scheme=http``. Addresses may carry
credentials, so a file is shown without them: ``str(file)`` is safe in messages, ``file.location``
is not.

The ending of a name, in any case, says what a file holds; what it does not say is never guessed.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import hashlib
import io
import lzma
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Final, Literal, cast
from urllib.parse import quote, unquote

import pyarrow as pa
from pyarrow import fs

from umim_core.addresses import is_address, redacted, scrubbed, without_options
from umim_core.errors import CorpusError, require
from umim_core.progress import logger, warn_once

SourceKind = Literal["text", "jsonl", "parquet", "dataset", "ids"]
ENDINGS: Final[dict[SourceKind, tuple[str, ...]]] = {
    "text": (".txt", ".text", ".md", ".markdown", ".rst"),
    "jsonl": (".jsonl", ".ndjson", ".jsonlines", ".json"),
    "parquet": (".parquet", ".pq"),
    "ids": (".npy",),
}
_KNOWN: Final = ", ".join(ending for endings in ENDINGS.values() for ending in endings)
PACKERS: Final = (".gz", ".zst", ".xz", ".bz2")
_OTHER_PACKERS: Final = (
    *(".zip", ".7z", ".rar", ".tar", ".tgz", ".txz", ".tbz", ".tbz2", ".lz", ".lz4", ".lzma"),
    *(".lzo", ".br", ".z", ".sz", ".snappy"),
)
_SHOWN: Final = 12  # reasons at most in one line
_READ_AHEAD: Final = 1 << 22  # bytes of one request to a remote file


@dataclass(frozen=True)
class CorpusFile:
    """One file of a corpus; shown as its path, or its address without credentials and options."""

    location: str = field(repr=False)

    def __str__(self) -> str:
        return redacted(without_options(self.location))

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
    def open_unpacked(self) -> Iterator[io.BufferedReader]:
        """Open the file for reading, unpacked where its name ends in one of `PACKERS`."""
        packer = endings_of(self.location)[1]
        with self.open() as raw:
            stream: object = raw
            if packer == ".gz":
                stream = gzip.GzipFile(fileobj=raw)
            elif packer == ".xz":
                stream = lzma.open(raw)  # noqa: SIM115  ends with the file
            elif packer == ".bz2":
                stream = bz2.open(raw)  # noqa: SIM115
            elif packer == ".zst":
                # pyarrow brings zstd; Python has it from 3.14 only.
                stream = pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd")
            yield raw if stream is raw else io.BufferedReader(cast(io.RawIOBase, stream))

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
    except (OSError, EOFError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
        raise CorpusError(
            f"{file}: the file must be readable and whole",
            f"{type(error).__name__}: {scrubbed(str(error), file.location)}",
            "Correct the file or leave it out.",
        ) from (None if is_address(file.location) else error)  # the cause may show credentials


# Endings


def endings_of(name: str) -> tuple[str, str]:
    """Return the ending that tells the kind and that of the packer, in lower case; "" for none.

    "A.JSONL.gz" -> (".jsonl", ".gz"), "notes" -> ("", "").
    """
    path = PurePosixPath(without_options(name).lower())
    packer = path.suffix if path.suffix in PACKERS else ""
    return PurePosixPath(path.name.removesuffix(packer)).suffix, packer


def kind_of(name: str) -> SourceKind | None:
    """Return the kind that a name's ending stands for, None for an ending that says nothing."""
    ending, packer = endings_of(name)
    kind = next((kind for kind, endings in ENDINGS.items() if ending in endings), None)
    return None if packer and kind in ("parquet", "ids") else kind


def unknown_kind(name: str) -> CorpusError:
    """Return the error of a name whose ending says nothing of what it holds."""
    ending, packer = endings_of(name)
    shown = str(CorpusFile(name))
    if ending in _OTHER_PACKERS:
        return CorpusError(
            f"a packed corpus file must end in {', '.join(PACKERS)}", shown, "Unpack it."
        )
    if packer and kind_of(without_options(name).lower().removesuffix(packer)) is not None:
        return CorpusError(f"a {ending} file must not be packed", shown, "Unpack it.")
    return CorpusError(
        f"a corpus file must end in {_KNOWN} (packed ones also in {', '.join(PACKERS)})",
        shown,
        "Say what it holds: --kind text, or jsonl, parquet, ids.",
    )


# Names


def expand(names: tuple[str, ...], kind: SourceKind | None = None) -> list[CorpusFile]:
    """Return the files that names, folders and patterns stand for, sorted by path.

    The order of the names does not matter. A local path that exists is taken literally, brackets
    and all. In addresses ``*`` and ``**`` are patterns. Of a folder, the files are taken that have
    an ending of the kind; of a pattern all files, or those of a known kind where ``kind`` is None.
    """
    files: dict[tuple[str, str], CorpusFile] = {}
    for name in names:
        local = unquote(name[len("file://") :]) if name.startswith("file:///") else name
        for location in _remote(name) if is_address(local) else _local(local, kind):
            file = CorpusFile(location)
            key = _identity(location)
            require(
                key not in files,
                CorpusError,
                "a corpus file must be named once",
                f"{files.get(key)} and {file}",
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


def _local(name: str, kind: SourceKind | None) -> list[str]:
    """Return a file, the files in a folder and below it, or those that fit a pattern."""
    if os.path.isfile(name):  # unlike Path.is_file, False for names no file can have
        return [name]
    is_folder = os.path.isdir(name)
    require(
        is_folder or not os.path.lexists(name),
        CorpusError,
        "a corpus file must be a regular file",
        f"{name}, a device, pipe, socket or broken link",
        "Write the text to a file.",
    )
    if not is_folder and not glob.has_magic(name):
        raise _missing(name)
    base, shapes = name, ["**"]
    if not is_folder:
        parts = name.split("/")
        first = next(number for number, part in enumerate(parts) if glob.has_magic(part))
        base = "/".join(parts[:first]) or ("/" if first else "")
        shapes = [part for part in parts[first:] if part]
        if not os.path.isdir(base or "."):
            raise _missing(f"{name}, with no folder {base}")
    depth = None if "**" in shapes else len(shapes)
    hidden = any(shape.startswith(".") for shape in shapes)
    files: list[str] = []
    left_out = Counter[str]()
    for path, reason in _below(base or ".", depth, hidden=hidden):
        names = os.path.relpath(path, base or ".").split("/")
        if _fits(names, shapes):
            ending_fits = kind_of(path) in ((kind,) if kind else ENDINGS)
            # A pattern whose kind is said may match any ending.
            if reason or not (ending_fits or (kind and not is_folder)):
                left_out[reason or "".join(endings_of(path)) or "without an ending"] += 1
            else:
                files.append(os.path.join(base, *names))
        elif not reason and _fits([n.lower() for n in names], [s.lower() for s in shapes]):
            left_out["written in another case"] += 1
    if not files:
        raise _no_file(name, left_out)
    if left_out:
        # The files of a corpus are looked for several times.
        warn_once(logger, f"{name}: {left_out.total()} left out: {_listed(left_out)}")
    return files


def _fits(names: list[str], shapes: list[str]) -> bool:
    """Return whether the folders and the name of a file fit a pattern; ``**`` is any folders."""
    if not shapes or not names:
        return not names and all(shape == "**" for shape in shapes)
    if shapes[0] == "**":
        return _fits(names, shapes[1:]) or _fits(names[1:], shapes)
    return fnmatchcase(names[0], shapes[0]) and _fits(names[1:], shapes[1:])


def _below(
    top: str, depth: int | None = None, *, hidden: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield what lies in a folder and below it, sorted, each with why it is left out, or "".

    Linked folders are followed; one that was read already, or that holds the folder, is not.
    """
    unreadable: list[str] = []
    real = Path(os.path.realpath(top))
    folders_read = {_inode(folder) for folder in real.parents}
    files_read: set[str] = set()
    for place, folders, files in os.walk(
        top, onerror=lambda error: unreadable.append(str(error.filename)), followlinks=True
    ):
        yield from ((folder, "without permission") for folder in unreadable)
        unreadable.clear()
        if (inode := _inode(place)) in folders_read:
            folders.clear()
            yield place, "linked twice"
            continue
        folders_read.add(inode)
        for name in sorted(files):
            path = os.path.join(place, name)
            target = os.path.realpath(path)
            if name.startswith(".") and not hidden:
                yield path, "hidden"
            elif not os.path.isfile(path):
                yield path, "no regular file"
            elif target in files_read:
                yield path, "linked twice"
            else:
                files_read.add(target)
                yield path, ""
        if not hidden:
            yield from ((os.path.join(place, n), "hidden") for n in folders if n.startswith("."))
        folders[:] = sorted(n for n in folders if hidden or not n.startswith("."))
        if depth is not None and len(Path(os.path.relpath(place, top)).parts) + 1 >= depth:
            folders.clear()
    yield from ((folder, "without permission") for folder in unreadable)


def _inode(path: str | Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def _listed(left_out: Counter[str]) -> str:
    shown = [f"{count} {reason}" for reason, count in left_out.most_common(_SHOWN)]
    others = left_out.total() - sum(count for _, count in left_out.most_common(_SHOWN))
    return ", ".join([*shown, *([f"{others} others"] if others else [])])


def _remote(name: str) -> list[str]:
    address, mark, options = name.partition("?")
    file = CorpusFile(name)
    if "*" not in address:
        filesystem, path = _resolve(name)
        with typed_errors(file):
            kind = filesystem.get_file_info(path).type
        require(
            kind != fs.FileType.Directory,
            CorpusError,
            "an address must be that of a file",
            str(file),
            f"Name its files: {str(file).rstrip('/')}/*.txt",
        )
        if kind != fs.FileType.File:
            raise _missing(str(file))
        return [name]
    folder = address[: address.index("*")].rpartition("/")[0]
    pattern = address[len(folder) + 1 :]
    filesystem, base = _resolve(folder + mark + options)
    selector = fs.FileSelector(base, allow_not_found=True, recursive="/" in pattern)
    with typed_errors(file):
        infos = filesystem.get_file_info(selector)
    # In an address, * is the only sign of a pattern.
    shapes = unquote(pattern).replace("[", "[[]").replace("?", "[?]").split("/")
    inside = [i.path[len(base) :].lstrip("/") for i in infos if i.type == fs.FileType.File]
    matches = [f"{folder}/{quote(p)}{mark}{options}" for p in inside if _fits(p.split("/"), shapes)]
    if not matches:
        raise _no_file(str(file))
    return matches


def _missing(shown: str) -> CorpusError:
    return CorpusError("a corpus file must exist", shown, "Check the path.")


def _no_file(shown: str, left_out: Counter[str] | None = None) -> CorpusError:
    return CorpusError(
        "a folder or pattern must give a file of a known kind",
        f"{shown}, with {_listed(left_out) if left_out else 'nothing'}",
        f"Name files that end in {_KNOWN}, or say what others hold: --kind text FOLDER/*.log.",
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
