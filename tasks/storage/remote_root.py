"""Artifacts in object storage: a stage that one machine finished, another one fetches.

With ``UMIM_ROOT=s3://bucket/prefix`` (or ``gs://``, ``az://``) stages are built in a local folder,
``artifact_root()``, as with a local root, and stored under the address::

    stages/<stage>/<key>.json    manifest of a finished stage; written last, created once
    objects/<aa>/<sha256>        every file by its SHA-256; equal files are stored once
    states/<stage>/<key>.json    files of the newest state of a training that is under way
    leases/<stage>/<key>.json    who builds a stage now
    checkpoints/<name>.json      names of checkpoints
    marks/<random>.json          left while the nodes of a cluster are asked whether they see it

A manifest names its files by digest and comes after all of them, so an upload that is cut off
leaves nothing but objects, which the next upload finds. Two builders of one stage may race: the
manifest of the first is kept, and the other takes it over.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tasks.storage.client_errors import refusals
from umim_core.addresses import scrubbed
from umim_core.checkpoint.checkpoint_index import artifact_root, remote_address
from umim_core.errors import ArtifactError, MissingExtraError
from umim_core.store.artifacts import MANIFEST, payload_files, safe_join, sha256_file
from umim_core.store.disk import flush_tree, write_bytes
from umim_core.store.publication import STATE
from umim_core.store.scratch import scratch_folder

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

logger = logging.getLogger("umim.store")
Entries = Mapping[str, Mapping[str, Any]]  # bytes and sha256 by relative name, as in a manifest
# An object that no manifest names is left alone for so long: its upload may be under way.
UPLOAD_SECONDS: Final = 86_400.0
LEASE_SECONDS: Final = 90.0  # a lease that its holder has not renewed for so long is void
_POLL_SECONDS: Final = 2.0
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "STORAGE_EMULATOR_HOST")
_STATE_SECONDS: Final = 30.0  # between two looks for a new training state


def remote_root() -> RemoteRoot | None:
    """Return the place that ``UMIM_ROOT`` gives the address of; None for a local root."""
    address = remote_address()
    return None if address is None else _opened(address)


@functools.lru_cache(maxsize=4)
def _opened(address: str) -> RemoteRoot:
    import fsspec

    scheme = address.split("://", 1)[0]
    try:
        filesystem, path = fsspec.core.url_to_fs(address, use_listings_cache=False)
    except (ImportError, ValueError, *refusals()) as error:
        raise MissingExtraError(
            f"UMIM_ROOT={scheme}://... needs a package that reads and writes it",
            _shown(error),
            "Install umim[s3], umim[gcs] or umim[azure]; check the variables of its client.",
        ) from error
    return RemoteRoot(address, filesystem, path.rstrip("/"))


@dataclass(frozen=True, eq=False)
class RemoteRoot:
    """Finished stages, training states and names of checkpoints in object storage.

    Every method raises ArtifactError, with the address but no credentials, where the storage does
    not answer or refuses.
    """

    address: str
    filesystem: AbstractFileSystem = field(repr=False)
    path: str

    def manifest(self, name: str) -> dict[str, Any] | None:
        """Return the manifest of a finished stage ``<stage>/<key>``, None where there is none."""
        data = self._read(place := f"stages/{name}.json")
        return None if data is None else _parsed(data, f"{self}/{place}")

    def fetch(self, name: str, final: Path) -> bool:
        """Bring a finished stage to its local directory.

        A local copy with the manifest of the storage stays; another one gives way.

        Returns:
            Whether the storage holds the stage.
        """
        data = self._read(f"stages/{name}.json")
        if data is None:
            return False
        local = final / MANIFEST
        if local.is_file() and local.read_bytes() == data:
            return True
        began = time.monotonic()
        files: Entries = _parsed(data, f"{self}/stages/{name}.json")["files"]
        final.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(final.parent, final.name) as incoming:
            self.fetch_files(files, incoming)
            (incoming / MANIFEST).write_bytes(data)
            flush_tree(incoming)
            shutil.rmtree(final, ignore_errors=True)
            incoming.rename(final)
        logger.info("%s: fetched in %.1f s", name.split("/")[0], time.monotonic() - began)
        return True

    def publish(self, name: str, final: Path) -> bool:
        """Store a finished stage: its files first, its manifest last.

        Returns:
            Whether the manifest is this one; False if another builder was first.
        """
        self.store_files(payload_files(final))
        data = (final / MANIFEST).read_bytes()
        created = self._create(f"stages/{name}.json", data)
        self.remove(f"states/{name}.json")
        return created or self._read(f"stages/{name}.json") == data

    def store_files(self, files: Mapping[str, Path]) -> dict[str, dict[str, object]]:
        """Store files as objects; return size and SHA-256 of each by its name."""
        entries: dict[str, dict[str, object]] = {}
        for name, path in files.items():
            digest, size = sha256_file(path), path.stat().st_size
            entries[name] = {"bytes": size, "sha256": digest}
            if not self._stays(digest, size):
                with self._typed_errors():
                    self.filesystem.put_file(str(path), self._place(object_place(digest)))
        return entries

    def fetch_files(self, files: Entries, directory: Path) -> None:
        """Bring files to a directory by their SHA-256, and compare what came with it."""
        for name, entry in files.items():
            target = safe_join(directory, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            place = object_place(str(entry["sha256"]))
            with self._typed_errors():
                try:
                    self.filesystem.get_file(self._place(place), str(target))
                except FileNotFoundError as error:
                    raise ArtifactError(
                        f"{self} must hold every file of its stages",
                        f"no {place}, which is {name}",
                        "Remove the stage with `python -m flows store rm`; it is built again.",
                    ) from error
            if sha256_file(target) != entry["sha256"]:
                raise ArtifactError(
                    f"{self}/{place} must be as it was written",
                    "another SHA-256",
                    "Remove it in the storage; the stage is uploaded or built again.",
                )

    @contextlib.contextmanager
    def lease(self, name: str, finished: Callable[[], bool]) -> Iterator[bool]:
        """Hold the right to build a stage, renewed until the block ends.

        A lease is void once its holder has not renewed it for ``LEASE_SECONDS`` by the clock of
        the one who waits, or if its holder was a process of this machine that is gone. It saves
        work and is no lock: what makes a result unique is its manifest.

        Yields:
            Whether the stage is to be built here; False if another builder finished it.
        """
        self._require_conditional_writes()
        place, token = f"leases/{name}.json", secrets.token_hex(8)
        if not self._acquire(place, token, finished):
            yield False
            return
        ended = threading.Event()
        renewal = threading.Thread(target=self._renew, args=(place, token, ended), daemon=True)
        renewal.start()
        try:
            yield True
        finally:
            ended.set()
            renewal.join()
            with contextlib.suppress(ArtifactError):  # it becomes void by itself
                if self._holder(place).get("token") == token:
                    self.remove(place)

    @contextlib.contextmanager
    def mark(self) -> Iterator[str]:
        """Leave an object of a random name, by which others see that they use this storage."""
        place = f"marks/{secrets.token_hex(8)}.json"
        self._write(place, b"{}")
        try:
            yield place
        finally:
            self.remove(place)

    def sees_mark(self, place: str) -> bool:
        """Tell whether a mark lies in this storage."""
        return self._read(place) is not None

    @contextlib.contextmanager
    def storing_states(self, name: str, partial: Path) -> Iterator[None]:
        """Bring the newest training state here, and store each new one until the block ends."""
        self._fetch_state(name, partial)
        ended = threading.Event()
        watcher = threading.Thread(
            target=self._store_states, args=(name, partial / STATE, ended), daemon=True
        )
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()

    def store_record(self, record: Path) -> None:
        """Store the record of a checkpoint's name, a file below ``artifact_root()``."""
        self._write(record.relative_to(artifact_root()).as_posix(), record.read_bytes())

    def names(self, folder: str) -> dict[str, float]:
        """Return all names below a folder, without ``.json``, and how many seconds old each is."""
        base, now = f"{self.path}/{folder}", time.time()
        with self._typed_errors():
            listed = self.filesystem.find(base, detail=True)
        return {
            path[len(base) + 1 :].removesuffix(".json"): max(0.0, now - _modified(entry))
            for path, entry in sorted(listed.items())
            if len(path) > len(base) + 1 and not path.endswith("/")  # some list the folder, too
        }

    def checkpoint_stages(self) -> dict[str, str]:
        """Return the stage ``<stage>/<key>`` that each named checkpoint lies in."""
        stages = {}
        for name in self.names("checkpoints"):
            place = f"checkpoints/{name}.json"
            record = _parsed(self._read(place) or b"{}", f"{self}/{place}")
            parts = Path(str(record.get("path", ""))).parts
            if len(parts) > 1 and not Path(*parts).is_absolute() and ".." not in parts:
                stages[name] = "/".join(parts[:2])
        return stages

    def fetch_records(self) -> None:
        """Bring the names of checkpoints here."""
        for name in self.names("checkpoints"):
            data = self._read(f"checkpoints/{name}.json")
            if data is not None:
                write_bytes(safe_join(artifact_root() / "checkpoints", f"{name}.json"), data)

    def state_files(self, name: str) -> Entries:
        """Return the files of the stored training state of a stage, none where there is none."""
        data = self._read(f"states/{name}.json")
        files: Entries = {} if data is None else _parsed(data, f"{self}/states/{name}.json")
        return files

    def object_size(self, digest: str) -> int | None:
        """Return the bytes of a stored file by its SHA-256, None where it is missing."""
        entry = self._entry(digest)
        return None if entry is None else int(entry["size"])

    def _entry(self, digest: str) -> Mapping[str, Any] | None:
        with self._typed_errors():
            try:
                entry: Mapping[str, Any] = self.filesystem.info(self._place(object_place(digest)))
            except FileNotFoundError:
                return None
            return entry

    def _stays(self, digest: str, size: int) -> bool:
        """Return whether a file is stored, and so young that a collection leaves it."""
        entry = self._entry(digest)
        if entry is None or time.time() - _modified(entry) > UPLOAD_SECONDS / 2:
            return False  # written again, it is young again
        return int(entry["size"]) == size

    def object_digest(self, digest: str) -> str:
        """Return the SHA-256 of what is stored under a digest; the file is read whole."""
        artifact_root().mkdir(parents=True, exist_ok=True)
        with scratch_folder(artifact_root(), "verify") as folder:
            with self._typed_errors():
                self.filesystem.get_file(self._place(object_place(digest)), str(folder / digest))
            return sha256_file(folder / digest)

    def __str__(self) -> str:
        return self.address.rstrip("/")

    def _require_conditional_writes(self) -> None:
        """Refuse storage that creates an object twice: two builders would both win, unnoticed."""
        if self.address in _CONDITIONAL:
            return
        with self.mark() as place:
            if self._create(place, b'{"second": true}'):
                raise ArtifactError(
                    f"the storage {self} must refuse to create an object that exists",
                    "it wrote one twice (a PUT with If-None-Match: *)",
                    "Use a server with conditional writes: S3, MinIO, SeaweedFS from 4.18 on.",
                )
        _CONDITIONAL.add(self.address)

    def _acquire(self, place: str, token: str, finished: Callable[[], bool]) -> bool:
        seen, since, logged = b"", time.monotonic(), False
        while not finished():
            if self._create(place, _lease(token, 0)):
                if not finished():
                    return True
                self.remove(place)
                return False
            data = self._read(place)
            if data is None:
                continue
            if data != seen:
                seen, since = data, time.monotonic()
            holder = _parsed(data, f"{self}/{place}")
            if _gone(holder) or time.monotonic() - since > LEASE_SECONDS:
                self.remove(place)
                continue
            if not logged:
                logger.info("waiting for %s, built on %s", place, holder.get("host"))
                logged = True
            time.sleep(_POLL_SECONDS)
        return False

    def _renew(self, place: str, token: str, ended: threading.Event) -> None:
        count = 0
        while not ended.wait(LEASE_SECONDS / 4):
            count += 1
            try:
                if self._holder(place).get("token") == token:
                    self._write(place, _lease(token, count))
            except ArtifactError as error:  # tried again; a void lease costs work, not results
                logger.warning("a lease could not be renewed: %s", error)

    def _holder(self, place: str) -> dict[str, Any]:
        data = self._read(place)
        return {} if data is None else _parsed(data, f"{self}/{place}")

    def _fetch_state(self, name: str, partial: Path) -> None:
        from umim_core.training.train_state import last_step  # torch, which nodes may not need

        files = self.state_files(name)
        steps = [
            int(file.split("/")[1].removeprefix("step-")) for file in files if "/step-" in file
        ]
        here = last_step(partial / STATE)
        if not steps or (here is not None and here >= max(steps)):
            return
        with scratch_folder(partial.parent, partial.name) as incoming:
            self.fetch_files(files, incoming)
            shutil.rmtree(partial / STATE, ignore_errors=True)
            (incoming / STATE).rename(partial / STATE)

    def _store_states(self, name: str, state: Path, ended: threading.Event) -> None:
        from umim_core.training.train_state import last_step

        stored = last_step(state)
        over = False
        while not over:
            over = ended.wait(_STATE_SECONDS)
            step = last_step(state)
            if step is None or step == stored:
                continue
            try:
                self._store_state(name, state, step)
                stored = step
            except FileNotFoundError:  # training removed it meanwhile: a newer one is there
                continue
            except ArtifactError as error:
                logger.warning("training goes on; its state could not be stored: %s", error)

    def _store_state(self, name: str, state: Path, step: int) -> None:
        files = {
            file.relative_to(state.parent).as_posix(): file
            for file in sorted((state / f"step-{step:08d}").rglob("*"))
            if file.is_file()
        }
        entries = self.store_files(files)
        self._write(f"states/{name}.json", json.dumps(entries, sort_keys=True).encode())

    def _create(self, relative: str, data: bytes) -> bool:
        """Write an object that must not exist yet; return whether it is this one now.

        Servers name the refusal differently, and a write that is repeated after a lost answer is
        refused by its own first try: what is there then decides.
        """
        for last in (False, True):
            with self._typed_errors():
                try:
                    with self.filesystem.open(self._place(relative), "xb") as stream:
                        stream.write(data)
                except OSError:
                    held = self._read(relative)
                    if held is not None:
                        return held == data
                    if last:
                        raise
                    continue  # its holder removed it meanwhile
            return True
        return False

    def _write(self, relative: str, data: bytes) -> None:
        with self._typed_errors():
            self.filesystem.pipe_file(self._place(relative), data)

    def _read(self, relative: str) -> bytes | None:
        with self._typed_errors():
            try:
                return bytes(self.filesystem.cat_file(self._place(relative)))
            except FileNotFoundError:
                return None

    def remove(self, relative: str) -> None:
        """Remove an object by its place under the address; a missing one is no error."""
        with self._typed_errors(), contextlib.suppress(FileNotFoundError):
            self.filesystem.rm_file(self._place(relative))

    def _place(self, relative: str) -> str:
        return f"{self.path}/{relative}"

    @contextlib.contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            if error.filename and Path(str(error.filename)).is_absolute():
                raise  # a local file
            raise self._refused(error) from error
        except refusals() as error:
            raise self._refused(error) from error

    def _refused(self, error: BaseException) -> ArtifactError:
        return ArtifactError(
            f"the storage {self} must answer, and allow reading and writing",
            f"{type(error).__name__}: {_shown(error)}",
            "Check address, credentials and network, then run the same command again.",
        )


_CONDITIONAL: Final[set[str]] = set()  # addresses of storage that was seen to have them


def _shown(error: BaseException) -> str:
    return scrubbed(str(error), *(os.environ.get(name, "") for name in _ENDPOINTS))


def object_place(digest: str) -> str:
    """Return where a file lies under the address, by its SHA-256."""
    return f"objects/{digest[:2]}/{digest}"


def _lease(token: str, count: int) -> bytes:
    holder = {"token": token, "renewed": count, "host": socket.gethostname(), "pid": os.getpid()}
    return json.dumps(holder).encode()


def _gone(holder: Mapping[str, Any]) -> bool:
    """Return whether the holder of a lease was a process of this machine that has ended."""
    if holder.get("host") != socket.gethostname():
        return False
    try:
        os.kill(int(holder["pid"]), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, KeyError, ValueError):
        return False
    return False


def _parsed(data: bytes, place: str) -> dict[str, Any]:
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{place} must be JSON", str(error), "Remove it.") from error
    if not isinstance(record, dict):
        raise ArtifactError(f"{place} must be a JSON object", type(record).__name__, "Remove it.")
    return record


def _modified(entry: Mapping[str, Any]) -> float:
    """Return when an object was written, in seconds since 1970; now where storage does not say."""
    names = ("LastModified", "mtime", "updated", "last_modified", "created")
    stamp = next((entry[name] for name in names if entry.get(name)), None)
    if hasattr(stamp, "timestamp"):
        return float(stamp.timestamp())
    return float(stamp) if isinstance(stamp, int | float) else time.time()
