"""The only ``import mlflow``: one experiment of one tracking store.

Every call names its run, because MLflow's active run is kept per thread and Prefect uses threads,
and may be made twice: points carry step and time. MLflow is imported at first use.
"""

from __future__ import annotations

import getpass
import json
import logging
import math
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from filelock import FileLock, Timeout

from tasks.storage.remote_root import refusals
from tasks.tracking.tracking_values import Kind, RunInput, Status, StoredRun, batches
from umim_core.addresses import scrubbed
from umim_core.errors import TrackingError
from umim_core.store.artifacts import canonical_json
from umim_core.store.disk import unwritable, write_bytes
from umim_core.store.locking import directory_lock

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT: Final = "umim"
REGISTERED_MODEL: Final = "umim"
KEY_TAG: Final = "umim.key"
KIND_TAG: Final = "umim.kind"
CALL_SECONDS: Final = 5
_DATABASES: Final = ("sqlite", "postgresql", "mysql", "mssql")
CREATION_SECONDS: Final = 300  # of a new store: seconds of work, minutes on a busy machine
UPLOAD_SECONDS: Final = 300  # of one file; a server may hand it on before it answers
_SHARED_VIEW: Final = "mlflow.sharedViewState."
# What a store says when it will never take a call as it is; everything else may pass.
_REFUSALS: Final = ("BAD_REQUEST", "INVALID_PARAMETER_VALUE", "MALFORMED_REQUEST")
ROOT_TAG: Final = "umim.root"
USER_TAG: Final = "mlflow.user"  # MLflow's pages have a column for it
_ROOT_ID: Final = "root-id"
_UNFIT: Final = re.compile(r"[^\w.\-@]+")  # what a query cannot hold
Owner = dict[str, str]
logger = logging.getLogger("umim.tracking")
_SILENT_SECONDS: Final = 2


class StoreAwayError(TrackingError):
    """The store does not answer or cannot be used now; later it may."""


def _place(uri: str, root: Path) -> Path:
    """Return the file of a sqlite address as SQLAlchemy reads it; a file of the root for others."""
    from sqlalchemy.engine import make_url

    if not uri.partition("://")[0].lower().startswith("sqlite"):
        return root / "mlflow"
    file = make_url(uri).database or ":memory:"
    return root / "mlflow" if file.startswith((":memory:", "file:")) else Path(file)


def _open_once(uri: str) -> None:
    """Open a database, which MLflow would try nine times, for 102 seconds."""
    from sqlalchemy import create_engine, inspect

    if not uri.lower().startswith(_DATABASES):
        return
    engine = create_engine(uri)
    try:
        inspect(engine).get_table_names()
    finally:
        engine.dispose()


@contextmanager
def _held(place: Path, ending: str, seconds: int) -> Iterator[None]:
    lock = FileLock(place.with_name(f"{place.name}.{ending}"))
    # FileLock waits where the file cannot be made; a link is not followed.
    os.close(os.open(lock.lock_file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644))
    try:
        with suppress(Timeout):
            lock.acquire(timeout=min(seconds, _SILENT_SECONDS))
        if not lock.is_locked:
            left = max(0, seconds - _SILENT_SECONDS)
            if left:
                logger.info("waiting for another run that uses %s", place)
            lock.acquire(timeout=left)
    except Timeout as error:
        raise StoreAwayError(
            f"the tracking store must be free within {seconds} s",
            str(place),
            "End the process that holds it, or use a server (MLFLOW_TRACKING_URI).",
        ) from error
    try:
        yield
    finally:
        lock.release()


def owner_of(folder: Path) -> Owner:
    """Return the tags by which runs of this user and an artifact root are found."""
    return {ROOT_TAG: _root_id(folder / _ROOT_ID), USER_TAG: _user()}


def _root_id(path: Path) -> str:
    try:
        with suppress(FileNotFoundError):
            return path.read_text(encoding="ascii")
        with directory_lock(path, wait_seconds=None):
            if not path.is_file():
                write_bytes(path, uuid.uuid4().hex.encode("ascii"))
            return path.read_text(encoding="ascii")
    except OSError as error:
        raise unwritable(path, 0, error) from error


def _user() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        name = str(os.getuid())
    return _UNFIT.sub("_", name)


class Store:
    """One experiment, made if it is not there."""

    def __init__(self, uri: str, root: Path) -> None:
        self.uri = uri
        self.root = root
        self.served = uri.startswith(("http://", "https://"))
        self._connected: tuple[MlflowClient, str] | None = None

    @property
    def experiment_id(self) -> str:
        """Id of the experiment; inside ``session`` only."""
        return self._connection[1]

    @property
    def _client(self) -> MlflowClient:
        return self._connection[0]

    @property
    def _connection(self) -> tuple[MlflowClient, str]:
        if self._connected is None:
            raise TrackingError("the store is used inside `with store.session(...)`")
        return self._connected

    @contextmanager
    def session(
        self, creation_seconds: int, connect_seconds: int, call_seconds: int
    ) -> Iterator[Store]:
        """Hold the store for a few writes; without a server, one process at a time."""
        for name in ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"):
            os.environ.setdefault(name, "true")
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        place: Path | None = None
        try:
            _limit_requests(connect_seconds)
            with ExitStack() as held:
                if not self.served:
                    self.root.mkdir(parents=True, exist_ok=True)
                    place = _place(self.uri, self.root)
                    if self._connected is None:  # one process connects at a time
                        if str(place) in self.uri:  # else MLflow makes the folder of other letters
                            place.parent.mkdir(parents=True, exist_ok=True)
                        held.enter_context(_held(place, "connecting.lock", creation_seconds))
                        _open_once(self.uri)
                    held.enter_context(_held(place, "lock", connect_seconds))
                if self._connected is None:
                    self._connected = self._connect()
                _limit_requests(call_seconds)
                yield self
        except (MlflowException, SQLAlchemyError, ImportError, *refusals()) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            where = self.uri if self.served or place is None else f"{self.uri}, that is {place}"
            message = scrubbed(f"{where}: {reason}", self.uri)
            if _refused(error):
                raise TrackingError("the store must take what is written", message) from error
            self._connected = None
            raise StoreAwayError(
                "the tracking store must answer",
                message,
                "Start the server or set MLFLOW_TRACKING_URI.",
            ) from error

    def find(self, kind: Kind, key: str, owner: Owner) -> StoredRun | None:
        """Return an owner's run of (kind, key), the first if there are several."""
        return (self._find(kind, key, owner) or [None])[0]

    def ensure(
        self,
        kind: Kind,
        key: str,
        name: str,
        owner: Owner,
        tags: Mapping[str, str] | None = None,
        *,
        time_ms: int,
    ) -> StoredRun:
        """Find an owner's run of (kind, key) or make it; of two made at once the first stays."""
        runs = self._find(kind, key, owner)
        if runs:
            return runs[0]
        labels = {**(tags or {}), **owner, KEY_TAG: key, KIND_TAG: kind}
        new_run = self._client.create_run(self.experiment_id, time_ms, labels, name)
        first = self._find(kind, key, owner)[0]
        if first.run_id != new_run.info.run_id:
            self._client.delete_run(new_run.info.run_id)
        return first

    def log(
        self,
        run_id: str,
        params: Mapping[str, str] | None = None,
        points: Sequence[tuple[str, int, float]] = (),
        tags: Mapping[str, str] | None = None,
        *,
        time_ms: int = 0,
    ) -> None:
        """Write in batches what a run is described by."""
        from mlflow.entities import Metric, Param, RunTag

        client = self._client
        for piece in batches(sorted((params or {}).items()), 100):
            client.log_batch(run_id, params=[Param(*item) for item in piece], synchronous=True)
        for piece in batches(sorted((tags or {}).items()), 100):
            client.log_batch(run_id, tags=[RunTag(*item) for item in piece], synchronous=True)
        finite = [point for point in points if math.isfinite(point[2])]
        for batch in batches(finite, 1000):
            metrics = [Metric(n, float(v), time_ms, int(s)) for n, s, v in batch]
            client.log_batch(run_id, metrics=metrics, synchronous=True)

    def log_inputs(self, run_id: str, inputs: Sequence[RunInput]) -> None:
        """Record which data sets a run read."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        entries = []
        for entry in inputs:
            # MLflow keeps 36 characters of a digest; the source keeps it whole.
            source = canonical_json({"digest": entry.digest, "uri": entry.source})
            dataset = Dataset(entry.name, entry.digest[:36], "umim", source)
            tags = [InputTag("mlflow.data.context", entry.context)]
            entries.append(DatasetInput(dataset, tags))
        if entries:
            self._client.log_inputs(run_id, entries)

    def log_files(self, run_id: str, paths: Sequence[Path], *, replace: bool = False) -> None:
        """Keep files, and folders under their own name, with a run; what it has whole stays."""
        if missing := [str(path) for path in paths if not path.exists()]:
            raise TrackingError("files to be kept with a run must still be there", missing[0])
        held: dict[str | None, set[tuple[str, int]]] = {}
        for path in paths:
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                if file.is_dir():
                    continue
                name = file.relative_to(path.parent)
                folder = None if file == path else name.parent.as_posix()
                if folder not in held:
                    known = [] if replace else self._client.list_artifacts(run_id, folder)
                    held[folder] = {(one.path, one.file_size) for one in known}
                if (name.as_posix(), file.stat().st_size) not in held[folder]:
                    self._client.log_artifact(run_id, str(file), folder)

    def log_table(self, run_id: str, columns: Mapping[str, Sequence[object]], file: str) -> None:
        """Keep a table with a run, by column, and list it among the run's tables.

        It is listed last, so one that is listed is whole and stays; what a killed call left of one
        is replaced. MLflow's own function would add the rows to it once more.
        """
        import pandas
        from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

        tags = self._client.get_run(run_id).data.tags
        listed: list[object] = json.loads(tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))
        entry = {"path": file, "type": "table"}
        if entry in listed:
            return
        text = pandas.DataFrame(dict(columns)).to_json(orient="split", index=False)
        self._client.log_text(run_id, text, file)
        self._client.set_tag(run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps([*listed, entry]))

    def set_status(self, run_id: str, status: Status, time_ms: int) -> None:
        """Open a run again, or close it at a time."""
        if status == "RUNNING":
            self._client.update_run(run_id, status=status)
        else:
            self._client.set_terminated(run_id, status, time_ms)

    def share_view(self, name: str, state: str) -> None:
        """Keep the state of MLflow's page of runs under a name that a link can ask for."""
        tag = f"{_SHARED_VIEW}{name}"
        if self._client.get_experiment(self.experiment_id).tags.get(tag) != state:
            self._client.set_experiment_tag(self.experiment_id, tag, state)

    def register(
        self, run_id: str, directory: Path, name: str, digest: str, backbone: str, *, alias: bool
    ) -> None:
        """Put a directory into the registry and, if asked for, point an alias there."""
        client = self._client
        if not client.search_registered_models(f"name = '{REGISTERED_MODEL}'"):
            client.create_registered_model(REGISTERED_MODEL)
        tags = {"umim.digest": digest, "umim.backbone": backbone}
        for model_version in client.search_model_versions(f"name = '{REGISTERED_MODEL}'"):
            if model_version.run_id == run_id and tags.items() <= model_version.tags.items():
                version = str(model_version.version)
                break
        else:
            folder = f"checkpoint/{name}"
            client.log_artifacts(run_id, str(directory), folder)
            source = f"{client.get_run(run_id).info.artifact_uri}/{folder}"
            model_version = client.create_model_version(
                REGISTERED_MODEL, source, run_id, tags, await_creation_for=None
            )
            version = str(model_version.version)
        if alias:
            client.set_registered_model_alias(REGISTERED_MODEL, name, version)

    def _connect(self) -> tuple[MlflowClient, str]:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        for noisy in ("alembic", "mlflow.store.db.utils", "mlflow.tracking"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
        experiment = client.get_experiment_by_name(EXPERIMENT)
        if experiment is None:
            place = None if self.served else (self.root / "mlruns").as_uri()
            try:
                return client, str(client.create_experiment(EXPERIMENT, place))
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                experiment = client.get_experiment_by_name(EXPERIMENT)
        if experiment is None or experiment.lifecycle_stage != "active":
            raise StoreAwayError(
                "the MLflow experiment must not be deleted",
                EXPERIMENT,
                "Restore it with `mlflow experiments restore`.",
            )
        return client, str(experiment.experiment_id)

    def _find(self, kind: Kind, key: str, owner: Owner) -> list[StoredRun]:
        wanted = {KEY_TAG: key, KIND_TAG: kind, **owner}
        query = " and ".join(f"tags.`{name}` = '{value}'" for name, value in wanted.items())
        runs = [
            StoredRun(run.info.run_id, run.info.status, run.info.start_time)
            for run in self._client.search_runs([self.experiment_id], query)
        ]
        return sorted(runs, key=lambda run: (run.start_time_ms, run.run_id))


def _limit_requests(seconds: int) -> None:
    """Let a request fail after some seconds without an answer; MLflow's own limit is minutes.

    It reads these at every request.
    """
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(seconds)
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    os.environ["PGCONNECT_TIMEOUT"] = str(seconds)


def _refused(error: Exception) -> bool:
    """Return whether a store will never take a call, as opposed to not now."""
    from mlflow.exceptions import MlflowException
    from requests import HTTPError

    if isinstance(error, HTTPError) and error.response is not None:
        return error.response.status_code in (400, 405, 411, 413, 415, 422)
    refused = isinstance(error, MlflowException) and error.error_code in _REFUSALS
    return refused and "must be in the 'active' state" not in str(error)  # a deletion is undone
