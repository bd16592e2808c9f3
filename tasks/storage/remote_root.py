"""Artifacts in object storage: a stage that one machine finished, another one fetches.

With ``UMIM_ROOT=s3://bucket/prefix`` (or ``gs://``, ``az://``) stages are built in a local folder,
``artifact_root()``, as with a local root, and stored under the address::

    stages/<stage>/<key>/manifest.json   of a finished stage; written last, created once
    stages/<stage>/<key>/<digest>/...    its files; <digest> is that of the manifest
    checkpoints/<name>.json              names of checkpoints
    clock                                written anew to learn the storage's time

A stage without a manifest is not there. Two machines may build one at the same time: the manifest
of the first counts, and the files of the other lie in a folder of their own unless they are equal.
So a stage is whole even where a server ignores ``If-None-Match`` and the last manifest wins.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import math
import os
import pkgutil
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import BaseModel, Field, ValidationError

from umim_core.addresses import scrubbed
from umim_core.checkpoint.checkpoint_index import artifact_root, remote_address
from umim_core.errors import ArtifactError, MissingExtraError, field_rule
from umim_core.store.artifacts import MANIFEST, payload_files, read_manifest, safe_join
from umim_core.store.locking import directory_lock
from umim_core.store.publication import give_name, make_way
from umim_core.store.scratch import scratch_folder

if TYPE_CHECKING:
    from fsspec.implementations.dirfs import DirFileSystem

logger = logging.getLogger("umim.store")
M = TypeVar("M", bound=BaseModel)
Entry = Mapping[str, Any]  # what a storage says of an object: size, time, ...
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "STORAGE_EMULATOR_HOST")
_TIMES: Final = ("LastModified", "mtime", "updated", "last_modified", "created")
_CLIENT_ERRORS: Final = (  # none of them is an OSError
    "aiohttp:ClientError",
    "azure.core.exceptions:AzureError",
    "boto3.exceptions:Boto3Error",
    "botocore.exceptions:BotoCoreError",
    "botocore.exceptions:ClientError",
    "gcsfs.retry:HttpError",
    "google.auth.exceptions:GoogleAuthError",
)


@functools.cache
def refusals(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the errors by which object storage refuses, as far as its clients are installed."""
    kinds: list[type[Exception]] = [*others, OSError]
    for name in _CLIENT_ERRORS:
        with contextlib.suppress(ImportError):
            kinds.append(pkgutil.resolve_name(name))
    return tuple(kinds)


def fetching(final: Path) -> contextlib.AbstractContextManager[None]:
    """Have one process at a time bring a stage to its local directory."""
    return directory_lock(final.with_name(f"{final.name}.fetch"), wait_seconds=None)


def remote_root() -> RemoteRoot | None:
    """Return the place that ``UMIM_ROOT`` gives the address of; None for a local root."""
    address = remote_address()
    return None if address is None else _opened(address)


@functools.lru_cache(maxsize=4)
def _opened(address: str) -> RemoteRoot:
    import fsspec
    from fsspec.implementations.dirfs import DirFileSystem

    scheme = address.split("://", 1)[0]
    try:
        filesystem, path = fsspec.core.url_to_fs(address, use_listings_cache=False)
    except refusals(ImportError, ValueError) as error:
        rule = f"UMIM_ROOT={scheme}://... needs a package that reads and writes it"
        remedy = "Install umim[s3], umim[gcs] or umim[azure]; check the variables of its client."
        raise MissingExtraError(rule, _shown(error), remedy) from error
    return RemoteRoot(address.rstrip("/"), DirFileSystem(path.rstrip("/"), filesystem))


class StoredFile(BaseModel):
    size: int = Field(alias="bytes")
    sha256: str


class StoredManifest(BaseModel):
    """What storage reads of a stage's manifest; ``read_manifest`` checks all of it."""

    digest: str = Field(pattern="^[0-9a-f]{64}$")
    layout: int = Field(alias="schema")
    files: dict[str, StoredFile]


class _Record(BaseModel):
    path: str = ""


@dataclass(frozen=True, eq=False)
class RemoteRoot:
    """Finished stages and names of checkpoints in object storage.

    Every method raises ArtifactError, with the address but no credentials, where the storage does
    not answer or refuses.
    """

    address: str
    filesystem: DirFileSystem

    def fetch(self, name: str, final: Path) -> bool:
        """Bring a finished stage ``<stage>/<key>`` to its local directory.

        A local copy stays if it has the manifest of the storage and its files are as that says;
        another one gives way. Return whether the storage holds the stage.
        """
        data = self.read(f"stages/{name}/{MANIFEST}")
        if data is None:
            return False
        began, manifest = time.monotonic(), self.manifest(name, data)
        local = final / MANIFEST
        if local.is_file() and local.read_bytes() == data:
            try:
                read_manifest(final, kind="stage", schema=manifest.layout)
                return True
            except ArtifactError as error:
                logger.warning("%s is fetched again: %s", name.split("/")[0], error)
        final.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(final.parent, final.name) as incoming:
            try:
                self._get(f"stages/{name}/{manifest.digest}", manifest.files, incoming)
            except ArtifactError:
                if self.read(f"stages/{name}/{MANIFEST}") == data:
                    raise
                return self.fetch(name, final)  # it was removed meanwhile, or built again
            (incoming / MANIFEST).write_bytes(data)
            try:
                read_manifest(incoming, kind="stage", schema=manifest.layout)
            except ArtifactError as error:
                raise self._altered(name, str(error).replace(f"{incoming}/", "")) from error
            make_way(final)
            give_name(incoming, final)
        logger.info("%s: fetched in %.1f s", name.split("/")[0], time.monotonic() - began)
        return True

    def publish(self, name: str, final: Path) -> bool:
        """Store a finished stage, its manifest last; return whether no other builder was first."""
        data = (final / MANIFEST).read_bytes()
        self._put(payload_files(final), f"stages/{name}/{self.manifest(name, data).digest}")
        return self._create(f"stages/{name}/{MANIFEST}", data)

    def stages(self) -> dict[str, dict[str, Entry]]:
        """Return what is stored of each stage: what has no manifest is not finished."""
        stages: dict[str, dict[str, Entry]] = {}
        for place, entry in self.objects("stages").items():
            stage, _, rest = place.partition("/")
            key, *inside = rest.split("/")
            if inside:  # former versions stored <stage>/<key>.json
                stages.setdefault(f"{stage}/{key}", {})["/".join(inside)] = entry
        return stages

    def manifest(self, name: str, data: bytes | None = None) -> StoredManifest:
        place = f"stages/{name}/{MANIFEST}"
        return self._parsed(StoredManifest, place, data or self.read(place) or b"")

    def store_record(self, record: Path) -> None:
        """Store the record of a checkpoint's name, a file below ``artifact_root()``."""
        self.write(record.relative_to(artifact_root()).as_posix(), record.read_bytes())

    def checkpoint_stages(self) -> dict[str, str]:
        """Return the stage that each named checkpoint lies in."""
        stages = {}
        for name in self.objects("checkpoints"):
            place = f"checkpoints/{name}"
            record = self._parsed(_Record, place, self.read(place) or b"{}")
            parts = PurePosixPath(record.path).parts
            if len(parts) > 1 and parts[0] != "/" and ".." not in parts:
                stages[name.removesuffix(".json")] = "/".join(parts[:2])
        return stages

    def now(self) -> float:
        self.write("clock", b"")
        with self._typed_errors():
            return modified(self.filesystem.info("clock"))

    def objects(self, folder: str) -> dict[str, Entry]:
        """Return all objects below a folder by their name there."""
        with self._typed_errors():
            found = self.filesystem.find(folder, detail=True)
        return {
            place.removeprefix(f"{folder}/"): entry
            for place, entry in sorted(found.items())
            if place != folder and not place.endswith("/")  # some list the folder, too
        }

    def sha256(self, place: str) -> str:
        with self._typed_errors(), self.filesystem.open(place, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    def write(self, place: str, data: bytes) -> None:
        with self._typed_errors():
            self.filesystem.pipe_file(place, data)

    def read(self, place: str) -> bytes | None:
        with self._typed_errors():
            try:
                return bytes(self.filesystem.cat_file(place))
            except FileNotFoundError:
                return None

    def remove(self, place: str) -> None:
        with self._typed_errors(), contextlib.suppress(FileNotFoundError):
            self.filesystem.rm_file(place)

    def remove_folder(self, folder: str) -> None:
        """Remove a folder, its manifest first: what a kill leaves of a stage is no stage."""
        self.remove(f"{folder}/{MANIFEST}")
        with self._typed_errors(), contextlib.suppress(FileNotFoundError):
            self.filesystem.rm(folder, recursive=True)

    def _create(self, place: str, data: bytes) -> bool:
        """Write an object that must not exist yet; return whether it is this one now.

        Servers name the refusal differently, and a write that is repeated after a lost answer is
        refused by its own first try: what is there then decides.
        """
        with self._typed_errors():
            try:
                with self.filesystem.open(place, "xb") as stream:
                    stream.write(data)
            except refusals():
                there = self.read(place)
                if there is None:
                    raise
                return there == data
        return True

    def _put(self, files: Mapping[str, Path], folder: str) -> None:
        with self._typed_errors():
            self.filesystem.put([*map(str, files.values())], [f"{folder}/{name}" for name in files])

    def _get(self, folder: str, names: Collection[str], directory: Path) -> None:
        targets = [safe_join(directory, name) for name in names]
        for target in targets:  # a full disk here is no fault of the storage
            target.parent.mkdir(parents=True, exist_ok=True)
        with self._typed_errors():
            try:
                self.filesystem.get([f"{folder}/{name}" for name in names], [*map(str, targets)])
            except FileNotFoundError as error:
                raise self._altered(folder, f"no {error.filename or error}") from error

    def _parsed(self, model: type[M], place: str, data: bytes) -> M:
        try:
            return model.model_validate_json(data)
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False)[0]
            rule = field_rule(".".join(map(str, found["loc"])), found)
            raise self._altered(place, rule) from error

    def _altered(self, place: str, value: str) -> ArtifactError:
        remedy = "Remove it there, a stage with `python -m flows store rm`; it is built again."
        return ArtifactError(f"{self.address} must hold {place} as it was written", value, remedy)

    @contextlib.contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except refusals(ValueError) as error:  # of an endpoint that is no address, say
            rule = f"the storage {self.address} must answer, and allow reading and writing"
            remedy = "Check address, credentials and network, then run the same command again."
            found = f"{type(error).__name__}: {_shown(error)}"
            raise ArtifactError(rule, found, remedy) from error


def modified(entry: Entry) -> float:
    """Return when an object was written, in seconds since 1970; in the future if none says."""
    stamp = next((entry[name] for name in _TIMES if hasattr(entry.get(name), "timestamp")), None)
    return math.inf if stamp is None else float(stamp.timestamp())


def _shown(error: BaseException) -> str:
    return scrubbed(str(error), *(os.environ.get(name, "") for name in _ENDPOINTS))
