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
import gzip
import hashlib
import io
import lzma
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal
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
_UNPACK: Final[dict[str, Callable[[Any], Any]]] = {
    ".gz": gzip.open,
    # pyarrow brings zstd; Python has it from 3.14 only.
    ".zst": lambda raw: pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd"),
    ".xz": lzma.open,
    ".bz2": bz2.open,
}
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
        """Open the stored bytes."""
        with typed_errors(self):
            if is_address(self.location):
                filesystem, path = _resolve(self.location)
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
            yield io.BufferedReader(_UNPACK[packer](raw)) if packer else raw


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
    packer = path.suffix if path.suffix in _UNPACK else ""
    return PurePosixPath(path.name.removesuffix(packer)).suffix, packer


def kind_of(name: str) -> SourceKind | None:
    """Return the kind that a name's ending stands for, None for an ending that says nothing."""
    ending, packer = endings_of(name)
    kind = next((kind for kind, endings in ENDINGS.items() if ending in endings), None)
    return None if packer and kind in ("parquet", "ids") else kind


def unknown_kind(name: str) -> CorpusError:
    """Return the error of a name whose ending says nothing of what it holds."""
    return CorpusError(
        f"a corpus file must end in {_KNOWN}; text and JSON Lines that are packed also in "
        f"{', '.join(_UNPACK)}",
        str(CorpusFile(name)),
        "Unpack it, or say what it holds: --kind text, or jsonl, parquet, ids.",
    )


# Names


def expand(names: tuple[str, ...], kind: SourceKind | None = None) -> list[CorpusFile]:
    """Return the files that names, folders and patterns stand for, sorted by path.

    The order of the names does not matter. A local path that exists is taken literally, brackets
    and all. In addresses ``*`` and ``**`` are patterns. Of a folder, the files are taken that have
    an ending of the kind; of a pattern all files, or those of a known kind where ``kind`` is None.
    """
    files: dict[str, CorpusFile] = {}
    for name in names:
        local = unquote(name[len("file://") :]) if name.startswith("file:///") else name
        for location in _remote(name) if is_address(local) else _local(local, kind):
            file = CorpusFile(location)
            # Options of an address do not change what it names, links do not for a path.
            key = redacted(location) if is_address(location) else os.path.realpath(location)
            require(
                key not in files,
                CorpusError,
                "a corpus file must be named once",
                f"{files.get(key)} and {file}",
                "Leave one of them out: its text would count twice.",
            )
            files[key] = file
    return sorted(files.values(), key=lambda file: _sort_key(file.location))


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
    sign = re.search(r"[*?[]", name)
    if is_folder:
        base, shapes = os.path.join(name, ""), ["**"]
    elif sign is None:
        raise _missing(name)
    else:
        base, shapes = _cut_pattern(name, sign.start())
        if not os.path.isdir(base or "."):
            raise _missing(f"{name}, with no folder {base}")
    files: list[str] = []
    left_out = Counter[str]()
    for parts, reason in _walk(base, shapes):
        if _fits(parts, shapes):
            path = base + "/".join(parts)
            ending_fits = kind_of(path) in ((kind,) if kind else ENDINGS)
            # A pattern whose kind is said may match any ending.
            if reason or not (ending_fits or (kind and not is_folder)):
                left_out[reason or "".join(endings_of(path)) or "without an ending"] += 1
            else:
                files.append(path)
        elif not reason and _fits([p.lower() for p in parts], [s.lower() for s in shapes]):
            left_out["written in another case"] += 1
    if not files:
        raise _no_file(name, left_out)
    if left_out:
        # The files of a corpus are looked for several times.
        warn_once(logger, f"{name}: {left_out.total()} left out: {_listed(left_out)}")
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
    left: list[tuple[str, ...]] = [()]
    while left:
        inside, folders = left.pop(), list[tuple[str, ...]]()
        place = os.path.join(base, *inside) or "."
        if (folder := os.path.realpath(place)) in read:
            yield inside, "linked twice"
            continue
        read.add(folder)
        try:
            names = sorted(os.listdir(place))
        except OSError:
            yield inside, "without permission"
            continue
        for name in names:
            path = os.path.join(place, name)
            if name.startswith(".") and not hidden:
                yield (*inside, name), "hidden"
            elif os.path.isdir(path):
                folders.append((*inside, name))
            elif not os.path.isfile(path):
                yield (*inside, name), "no regular file"
            else:
                target = os.path.realpath(path)
                yield (*inside, name), "linked twice" if target in read else ""
                read.add(target)
        if "**" in shapes or len(inside) + 1 < len(shapes):
            left += reversed(folders)


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
    folder, parts = _cut_pattern(address, address.index("*"))
    filesystem, base = _resolve(folder.rstrip("/") + mark + options)
    deep = len(parts) > 1 or parts == ["**"]
    selector = fs.FileSelector(base, allow_not_found=True, recursive=deep)
    with typed_errors(file):
        infos = filesystem.get_file_info(selector)
    # In an address, * is the only sign of a pattern.
    shapes = [unquote(part).replace("[", "[[]").replace("?", "[?]") for part in parts]
    inside = [i.path[len(base) :].lstrip("/") for i in infos if i.type == fs.FileType.File]
    matches = [folder + quote(p) + mark + options for p in inside if _fits(p.split("/"), shapes)]
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
