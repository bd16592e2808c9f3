"""Artifacts on disk: canonical JSON, digests and manifests.

A directory without a valid ``manifest.json`` does not exist; ``publication`` gives it its name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from umim_core.errors import ArtifactError, ConfigError, UmimError, field_rule, require
from umim_core.store.disk import read_bytes, write_bytes

MANIFEST: Final = "manifest.json"
_MAX_JSON_BYTES: Final = 1 << 26
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")  # written as an escape
# Files that hubs, editors and file browsers add to an artifact; nothing reads them.
_UNLISTED: Final = re.compile(
    r"(README|LICENSE|NOTICE)(\.(md|txt))?|\.gitattributes|\.gitignore|\.DS_Store"
    r"|\.cache/huggingface/.*|\.git/.*"
)


def canonical_json(value: object) -> str:
    """Return the one JSON text of ``value``: sorted keys, no spaces, no NaN, no lone surrogate."""
    try:
        text = json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
        text.encode()
        return text
    except (TypeError, ValueError, RecursionError) as error:
        rule = "an artifact's JSON holds only finite numbers, strings, lists and mappings"
        raise ArtifactError(rule, str(error), "Convert the value before it is written.") from error


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def json_digest(value: object) -> str:
    """Return the SHA-256 of a value's canonical JSON."""
    return sha256_bytes(canonical_json(value).encode())


def sha256_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def described(rule: str, remedy: str, error: type[UmimError] = ArtifactError) -> Iterator[None]:
    """Raise the first finding within, of pydantic say, as an error of the file that is read."""
    try:
        yield
    except ValidationError as cause:
        first = cause.errors(include_url=False, include_input=False)[0]
        raise error(rule, field_rule(".".join(map(str, first["loc"])), first), remedy) from cause
    except ConfigError as cause:
        raise error(rule, str(cause).rstrip("."), remedy) from cause


def payload_files(directory: Path) -> dict[str, Path]:
    """Return the files of an artifact by POSIX-relative name, without its manifest."""
    files = {
        path.relative_to(directory).as_posix(): path
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    files.pop(MANIFEST, None)
    return files


def directory_digest(directory: Path) -> str:
    """Return the SHA-256 over the sorted "name sha256" lines of a directory's payload."""
    return digest_of({name: sha256_file(path) for name, path in payload_files(directory).items()})


def digest_of(sums: Mapping[str, str]) -> str:
    """Return the digest of a directory from the SHA-256 of its files by relative name."""
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(sums.items()))
    return sha256_bytes(lines.encode())


def write_json(path: Path, value: object) -> None:
    write_bytes(path, canonical_json(value).encode() + b"\n")


def read_json(path: Path) -> object:
    """Read a regular file of JSON in UTF-8, up to 64 MiB.

    It has no NaN, no lone surrogates and no key given twice.
    """
    try:
        data = read_bytes(path, _MAX_JSON_BYTES)
        value: object = json.loads(
            data.decode(), parse_constant=_no_number, object_pairs_hook=_unique
        )
        if _SURROGATE.search(data):
            canonical_json(value)
        return value
    except FileNotFoundError as error:
        raise ArtifactError(
            f"{path.name} must exist", str(path), "Build the artifact again."
        ) from error
    except (OSError, ValueError, RecursionError, ArtifactError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ArtifactError(
            f"{path} must be readable JSON", reason, "Build the artifact again."
        ) from error


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{twice[:99]!r} is given twice")
    return values


def write_manifest(directory: Path, *, kind: str, schema: int, body: Mapping[str, object]) -> str:
    """Write ``manifest.json``: the sizes and digests of all files, which must be in place.

    Readers refuse another kind ("rules", "stage", "checkpoint") and any other ``schema``, the
    version of the layout. Returned is the digest of the payload.
    """
    files = payload_files(directory)
    sums = {name: sha256_file(path) for name, path in files.items()}
    digest = digest_of(sums)
    record: dict[str, object] = {
        **body,
        "kind": kind,
        "schema": schema,
        "digest": digest,
        "files": {
            name: {"bytes": path.stat().st_size, "sha256": sums[name]}
            for name, path in files.items()
        },
    }
    write_json(directory / MANIFEST, {**record, "seal": _seal(record)})
    return digest


def _seal(record: Mapping[str, object]) -> str:
    """Return the SHA-256 of a manifest's other fields, as they are once read back."""
    return json_digest(json.loads(canonical_json(record)))


def read_manifest(
    directory: Path, *, kind: str, schema: int, verify: bool = True, required: Iterable[str] = ()
) -> dict[str, object]:
    """Read and check a manifest; sizes are always checked, SHA-256 of files with ``verify``.

    It must list the ``required`` files. What is neither a file nor a folder is refused: a reader
    would wait for a pipe.
    """
    record = read_json(directory / MANIFEST)
    recorded = record.get("kind") if isinstance(record, dict) else type(record).__name__
    if not isinstance(record, dict) or recorded != kind:
        raise ArtifactError(
            f"{directory} must hold an artifact of kind {kind!r}",
            recorded,
            "Name another directory.",
        )
    rule = f"{directory} must have schema {schema}"
    remedy = "Use the version of umim that wrote it, or build it again."
    require(record.get("schema") == schema, ArtifactError, rule, record.get("schema"), remedy)
    rule = f"{directory}/{MANIFEST} must be as it was written"
    remedy = "The manifest was altered; build the artifact again."
    sealed = _seal({key: value for key, value in record.items() if key != "seal"})
    require(record.get("seal") == sealed, ArtifactError, rule, "another checksum", remedy)
    listed = record.get("files")
    if not isinstance(listed, dict):
        raise ArtifactError(f"{directory}/{MANIFEST} must list its files", listed, "Build it again")
    files = {
        name: path
        for path in sorted(directory.rglob("*"))
        if (name := path.relative_to(directory).as_posix()) != MANIFEST
        and not path.is_dir()
        and (name in listed or not _UNLISTED.fullmatch(name))
    }
    special = {name for name, path in files.items() if not path.is_file()}
    odd = sorted((set(files) ^ set(listed)) | (set(required) - set(listed)) | special)
    rule = f"{directory} must hold exactly the files its manifest lists"
    remedy = "Restore the missing files, remove others, or build the artifact again."
    require(not odd, ArtifactError, rule, odd, remedy)
    for name, path in files.items():
        entry = listed[name] if isinstance(listed[name], dict) else {}
        size, there = entry.get("bytes"), path.stat().st_size
        rule = f"{path} must have {size} bytes"
        remedy = "The file is torn or altered; build the artifact again."
        require(size == there, ArtifactError, rule, there, remedy)
        if verify and (found := sha256_file(path)) != entry.get("sha256"):
            raise ArtifactError(
                f"{path} must have the SHA-256 in its manifest",
                found,
                "The file was altered; build the artifact again.",
            )
    return record


def safe_join(root: Path, name: str) -> Path:
    """Return ``root/name``, refusing names that leave ``root``."""
    base = root.resolve()
    try:
        target = (base / name).resolve()
    except (OSError, ValueError, RuntimeError):  # no name of a file, or a loop of links
        target = base
    if target == base or not target.is_relative_to(base):
        raise ArtifactError(
            "an artifact's name must stay inside its root", name, "Use a plain relative name."
        )
    return target
