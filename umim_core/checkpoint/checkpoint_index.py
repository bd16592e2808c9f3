"""Own checkpoints: artifact root, names and records.

Whatever trains leaves a record per checkpoint, ``checkpoints/<name>.json`` under the artifact root:
a pipeline under ``<recipe>/<cell>/<setting>``, ``umim train`` under ``trained/<folder>``.
"""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from umim_core.addresses import has_credentials
from umim_core.errors import ArtifactError, ConfigError, require
from umim_core.store.artifacts import read_json, sha256_bytes
from umim_core.store.disk import check_writable, write_bytes
from umim_core.store.publication import check_absent
from umim_core.store.user_cache import user_cache

logger = logging.getLogger("umim.checkpoint")
_INDEX: Final = "checkpoints"
_KEY: Final = re.compile(r"[0-9a-f]{8,64}")  # first digits of a stage's key, as logs show them
# Storage that clients of umim[s3], umim[gcs] and umim[azure] write, with a bucket.
_STORED: Final = re.compile(r"(s3a?|gs|gcs|az|abfss?)://[^/]")
_PACKAGE_PARENT: Final = Path(__file__).resolve().parents[2]


def artifact_root() -> Path:
    """Return ``UMIM_ROOT``, else ``.umim`` in the checkout; without one, in the current folder.

    Where ``UMIM_ROOT`` is an address, such as ``s3://bucket/prefix``, the pipeline stores there and
    works in a local folder, which is returned: ``UMIM_SCRATCH``, else one for each address in
    ``roots`` of the user's cache.
    """
    checkout = (_PACKAGE_PARENT / "pyproject.toml").is_file()
    default = (_PACKAGE_PARENT if checkout else Path.cwd()) / ".umim"
    address = remote_address()
    if address is not None:
        folder = user_cache() / "roots" / sha256_bytes(address.encode())[:16]
        return Path(os.environ.get("UMIM_SCRATCH") or folder).resolve()
    return Path(os.environ.get("UMIM_ROOT") or default).resolve()


def remote_address() -> str | None:
    """Return the address in ``UMIM_ROOT``, None where it is a directory or not set."""
    named = os.environ.get("UMIM_ROOT")
    if not named or "://" not in named:
        return None
    scheme = named.partition("://")[0]
    rule = "UMIM_ROOT must be an address without a user, a password and options"
    remedy = (
        "Write s3://bucket/prefix; credentials belong into the variables of the storage's client, "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for example."
    )
    require(not has_credentials(named), ConfigError, rule, f"{scheme}://***", remedy)
    rule = "UMIM_ROOT must be a directory or s3://bucket/prefix, gs://... or az://..."
    remedy = "Give the path of a directory, or the bucket of an object storage."
    require(_STORED.match(named) is not None, ConfigError, rule, named, remedy)
    return named


def local_root() -> Path:
    """Return ``artifact_root()`` for what is written there and not stored elsewhere."""
    address = remote_address()
    rule = "this command writes to a directory, while UMIM_ROOT is an address"
    remedy = "Name a directory with --out, or set UMIM_ROOT to one."
    require(address is None, ConfigError, rule, address, remedy)
    return artifact_root()


def own_name(*parts: str) -> str:
    """Return a name for the command line: letters, digits, dots and hyphens between slashes.

    ``own_name("novels", "llama tau 5 greedy+drop", "WT")`` is
    ``novels/llama-tau-5-greedy-drop/wt``. A part without any of them becomes digits of its SHA-256.
    """
    fit = (re.sub(r"[^a-z0-9._]+", "-", part.lower()).strip("-._") for part in parts)
    pairs = zip(fit, parts, strict=True)
    return "/".join(name or sha256_bytes(part.encode())[:8] for name, part in pairs)


def record_checkpoint(root: Path, name: str, directory: Path) -> Path:
    """Give a checkpoint a name, and return the file of the record; an older one is forgotten."""
    place = directory.resolve()
    inside = place.is_relative_to(root.resolve())
    path = str(place.relative_to(root.resolve())) if inside else str(place)
    record = root / _INDEX / f"{name}.json"
    write_bytes(record, json.dumps({"path": path}).encode() + b"\n")
    return record


@dataclass(frozen=True)
class OwnPlace:
    """Directory that a command writes a checkpoint to, and the name that it has there."""

    root: Path
    name: str
    directory: Path

    def record(self, checkpoint: Path) -> str | None:
        """Give the checkpoint its name and return it; None where it cannot be recorded."""
        try:
            record_checkpoint(self.root, self.name, checkpoint)
        except ArtifactError as error:
            logger.warning("the checkpoint has no name: %s", error)
            return None
        return self.name


def own_place(kind: str, out: Path | None, stem: str) -> OwnPlace:
    """Return ``out``, or a directory under the artifact root, named by kind and stem."""
    root = local_root() if out is None else artifact_root()
    name = own_name(kind, stem if out is None else out.resolve().name)
    directory = (out or root / name).resolve()
    if directory.is_file():
        check_absent(directory)
    check_writable(directory)
    return OwnPlace(root, name, directory)


def own_checkpoints() -> dict[str, Path]:
    """Return the directories of one's own checkpoints by name; those that are gone are left out."""
    base = artifact_root()
    index = base / _INDEX
    places = {}
    walk = os.walk(index)  # unlike rglob, it bears folders that go: of others who give names now
    for record in sorted(Path(at, file) for at, _, files in walk for file in files):
        place = _recorded(base, record) if record.suffix == ".json" else None
        if place is not None and place.is_dir():
            places[record.relative_to(index).with_suffix("").as_posix()] = place
    return places


def own_checkpoint(name: str) -> Path | None:
    """Return the directory of one's own checkpoint by name or by the first digits of its key.

    A key is that of the stage that made it; eight digits or more, and no other may begin so.
    """
    root = artifact_root()
    record = root / _INDEX / f"{name}.json"
    if not Path(name).is_absolute() and ".." not in Path(name).parts and record.is_file():
        return _recorded(root, record)
    if _KEY.fullmatch(name):
        stages = [path for path in root.glob(f"*/{name}*/checkpoint") if path.parent.suffix == ""]
        return stages[0] if len(stages) == 1 else None
    return None


def _recorded(root: Path, record: Path) -> Path | None:
    try:
        known = read_json(record)
        return root / str(known["path"]) if isinstance(known, dict) else None
    except (ArtifactError, KeyError):  # torn, or not one of ours
        return None
