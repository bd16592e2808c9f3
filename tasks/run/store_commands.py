"""Listing, checking and cleaning of artifacts in object storage: ``python -m flows store``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tasks.storage import remote_root as storage
from tasks.storage.remote_root import Entries, RemoteRoot, object_place, remote_root
from umim_core.errors import ArtifactError, ConfigError
from umim_core.store.artifacts import MANIFEST, digest_of

_DAY: Final = 86_400.0


@dataclass(frozen=True)
class Stored:
    """One finished stage in object storage."""

    name: str
    size: int
    files: int
    days: float
    checkpoints: tuple[str, ...]


@dataclass(frozen=True)
class Collected:
    """Result of a collection."""

    stages: tuple[str, ...]
    objects: int
    size: int


def stored_root() -> RemoteRoot:
    """Return the storage that ``UMIM_ROOT`` names."""
    remote = remote_root()
    if remote is None:
        raise ConfigError(
            "`flows store` works on object storage",
            "UMIM_ROOT is a directory or not set",
            "Set UMIM_ROOT=s3://bucket/prefix; a local root is read with ls and rm.",
        )
    return remote


def listed(remote: RemoteRoot) -> list[Stored]:
    """Return all finished stages."""
    named: dict[str, list[str]] = {}
    for checkpoint, stage in remote.checkpoint_stages().items():
        named.setdefault(stage, []).append(checkpoint)
    stages = []
    for name, age in remote.names("stages").items():
        files = _files(remote, name)
        size = sum(int(entry["bytes"]) for entry in files.values())
        stages.append(Stored(name, size, len(files), age / _DAY, tuple(named.get(name, ()))))
    return stages


def verify(
    remote: RemoteRoot, *, read: bool, progress: Callable[[str], None] = lambda _: None
) -> list[str]:
    """Return what is wrong with the stored stages, one line each."""
    wrong: list[str] = []
    checked: dict[str, str | None] = {}
    for name in remote.names("stages"):
        progress(name)
        for file, entry in _files(remote, name).items():
            digest = str(entry["sha256"])
            if digest not in checked:
                checked[digest] = _fault(remote, digest, int(entry["bytes"]), read)
            fault = checked[digest]
            if fault is not None:
                wrong.append(f"{name}: {file} {fault}")
    return wrong


def remove(remote: RemoteRoot, prefix: str) -> str:
    """Remove one stage by ``<stage>/<first digits of its key>``, and what of its files is damaged.

    A damaged file that stayed would be taken for what the next run stores. The other files go with
    ``collect``.
    """
    names = [name for name in remote.names("stages") if name.startswith(prefix)]
    if len(names) != 1 or "/" not in prefix:
        raise ArtifactError(
            "one stage must be named, as <stage>/<first digits of its key>",
            f"{prefix!r}, which {len(names)} stages begin with",
            "`python -m flows store ls` lists them.",
        )
    called = [c for c, stage in remote.checkpoint_stages().items() if stage == names[0]]
    if called:
        raise ArtifactError(
            "a stage with a named checkpoint stays",
            f"{names[0]}, checkpoint {called[0]}",
            f"Remove checkpoints/{called[0]}.json under {remote} first.",
        )
    entries = _files(remote, names[0]).values()
    remote.remove(f"stages/{names[0]}.json")
    for digest, size in {(str(entry["sha256"]), int(entry["bytes"])) for entry in entries}:
        if _fault(remote, digest, size, read=True):
            remote.remove(object_place(digest))
    return names[0]


def collect(remote: RemoteRoot, older_than_days: float) -> Collected:
    """Remove old stages that no named checkpoint was made from, and files that nothing names."""
    if older_than_days < 0:
        raise ConfigError("--older-than must be at least 0 days", older_than_days)
    ages = remote.names("stages")
    manifests = {name: remote.manifest(name) or {} for name in ages}
    reached = _reached(manifests, set(remote.checkpoint_stages().values()))
    old = [n for n, age in ages.items() if n not in reached and age >= older_than_days * _DAY]
    for name in old:
        remote.remove(f"stages/{name}.json")
    # Listed anew: what was stored meanwhile names files, too.
    stored = [_files(remote, name) for name in remote.names("stages")]
    stored += [remote.state_files(name) for name in remote.names("states")]
    named = {str(entry["sha256"]) for files in stored for entry in files.values()}
    objects, size = 0, 0
    for place, age in remote.names("objects").items():
        digest = place.rsplit("/", 1)[-1]
        if digest not in named and age >= storage.UPLOAD_SECONDS:
            size += remote.object_size(digest) or 0
            remote.remove(f"objects/{place}")
            objects += 1
    return Collected(tuple(old), objects, size)


def _reached(manifests: Mapping[str, Mapping[str, Any]], roots: set[str]) -> set[str]:
    """Return the stages that roots were made from, directly or through others, and the roots."""
    by_digest: dict[str, set[str]] = {}
    for name, manifest in manifests.items():
        by_digest.setdefault(str(manifest.get("digest")), set()).add(name)
        sums = {file: str(entry["sha256"]) for file, entry in manifest.get("files", {}).items()}
        for digest in (*sums.values(), *_folder_digests(sums)):
            by_digest.setdefault(digest, set()).add(name)
    reached: set[str] = set()
    waiting = [name for name in roots if name in manifests]
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        for digest in manifests[name].get("inputs", {}).values():
            waiting += by_digest.get(str(digest), set()) - reached
    return reached


def _folder_digests(sums: Mapping[str, str]) -> Iterator[str]:
    """Yield the digests by which stages name folders of others, with and without manifests."""
    for folder in {file.split("/")[0] for file in sums if "/" in file}:
        inside = {
            file[len(folder) + 1 :]: digest
            for file, digest in sums.items()
            if file.startswith(f"{folder}/")
        }
        yield digest_of(inside)
        yield digest_of({file: digest for file, digest in inside.items() if file != MANIFEST})


def _files(remote: RemoteRoot, name: str) -> Entries:
    manifest = remote.manifest(name)
    files: Entries = {} if manifest is None else manifest.get("files", {})
    return files


def _fault(remote: RemoteRoot, digest: str, size: int, read: bool) -> str | None:
    stored = remote.object_size(digest)
    if stored is None:
        return "is missing"
    if stored != size:
        return f"has {stored} bytes instead of {size}"
    if read and remote.object_digest(digest) != digest:
        return "has another SHA-256"
    return None
