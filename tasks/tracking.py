"""The only ``import mlflow``: one experiment of one tracking store.

Every call names its run, because MLflow's active run is kept per thread and Prefect uses threads.
MLflow is imported at first use.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from filelock import FileLock, Timeout

from tasks.tracking_values import batches, redact
from umim_core.artifacts import canonical_json
from umim_core.errors import TrackingError

if TYPE_CHECKING:
    from mlflow import MlflowClient

REGISTERED_MODEL: Final = "umim"
KEY_TAG: Final = "umim.key"
KIND_TAG: Final = "umim.kind"
Kind = Literal["pipeline", "stage", "comparison"]
Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]
_KEY: Final = re.compile(r"^[\w.:\-]+$")
_LOCK_SECONDS: Final = 120.0
# One request, no repeats, nine seconds: a server that hangs costs less than ten in all, because
# the first failure closes the tracker. MLflow's own defaults wait for minutes.
_HTTP_LIMITS: Final = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "9"}


@dataclass(frozen=True)
class RunInput:
    """A data set that a run read.

    Attributes:
        name: What it is called, e.g. ``tokens``.
        digest: SHA-256 of its content.
        source: Where it lies or what it was made from.
        context: What it was read for: training, validation or test.
    """

    name: str
    digest: str
    source: str
    context: str = "training"


@dataclass(frozen=True)
class StoredRun:
    """A run as the store knows it: its id, status and start time (milliseconds)."""

    run_id: str
    status: str
    start_time_ms: int


class Store:
    """One experiment, made if it is not there.

    Args:
        uri: Tracking and registry store.
        root: Where a store without a server keeps its lock and its artifacts (``mlruns``).
        experiment: Name of the experiment.
    """

    def __init__(self, uri: str, root: Path, experiment: str) -> None:
        self.uri = uri
        self.root = root
        self.experiment = experiment
        self.served = uri.startswith(("http://", "https://"))
        self._away: TrackingError | None = None
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
            raise TrackingError("the store is used inside `with store.session()`")
        return self._connected

    @contextlib.contextmanager
    def session(self) -> Iterator[Store]:
        """Hold the store for a few writes; without a server, one process at a time.

        Yields:
            This store, connected.

        Raises:
            TrackingError: If the store is away or refuses. Once a server was away, every later
                session fails at once.
        """
        if self._away is not None:
            raise self._away
        for name, value in _HTTP_LIMITS.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.exceptions import MlflowException, RestException

        try:
            with self._lock():
                if self._connected is None:
                    self._connected = self._connect()
                yield self
        except (MlflowException, OSError) as error:
            failure = TrackingError(
                "the tracking store must take what is written to it",
                redact(f"{self.uri}: {error}"),
                "Start the server or set MLFLOW_TRACKING_URI; the same command again writes what "
                "is missing.",
            )
            if self.served and not isinstance(error, RestException):
                self._away = failure
            raise failure from error

    def ensure(
        self, kind: Kind, key: str, name: str, tags: Mapping[str, str] | None = None
    ) -> StoredRun:
        """Find the run of (kind, key) or make it; of two made at once the first stays.

        Args:
            kind: What the run stands for.
            key: Digest that identifies it.
            name: Its name in lists, if it is made.
            tags: Its further tags, if it is made.

        Raises:
            TrackingError: If the key has signs that a query cannot hold.
        """
        if not _KEY.match(key):
            raise TrackingError("a run key must be letters, digits and . : _ -", key)
        found = self._find(kind, key)
        if found:
            return found[0]
        labels = {**(tags or {}), KEY_TAG: key, KIND_TAG: kind}
        made = self._client.create_run(self.experiment_id, tags=labels, run_name=name)
        first = self._find(kind, key)[0]
        if first.run_id != made.info.run_id:
            self._client.delete_run(made.info.run_id)
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
        """Write in batches what a run is described by.

        Args:
            run_id: The run.
            params: Values by name.
            points: (metric, step, value); NaN and infinities are left out.
            tags: Values by name.
            time_ms: One time for all points, so that writing them twice is writing them once.
        """
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

    def log_files(self, run_id: str, paths: Sequence[Path]) -> None:
        """Keep files, and folders under their own name, with a run."""
        for path in paths:
            if path.is_dir():
                self._client.log_artifacts(run_id, str(path), path.name)
            else:
                self._client.log_artifact(run_id, str(path))

    def set_status(self, run_id: str, status: Status) -> None:
        """Open a run again or close it."""
        if status == "RUNNING":
            self._client.update_run(run_id, status=status)
        else:
            self._client.set_terminated(run_id, status)

    def register(self, run_id: str, directory: Path, alias: str, digest: str, backbone: str) -> str:
        """Put a directory into the registry as it is and point an alias there.

        Args:
            run_id: Run that made it; the files are kept with that run.
            directory: What to register.
            alias: Letters, digits, ``_`` and ``-``.
            digest: SHA-256 of the directory; an equal one of the same run keeps its version.
            backbone: Kept as a tag of the version.

        Returns:
            The version in the registered model ``umim``.
        """
        client = self._client
        if not client.search_registered_models(f"name = '{REGISTERED_MODEL}'"):
            client.create_registered_model(REGISTERED_MODEL)
        tags = {"umim.digest": digest, "umim.backbone": backbone}
        for found in client.search_model_versions(f"name = '{REGISTERED_MODEL}'"):
            if found.run_id == run_id and found.tags == tags:
                version = str(found.version)
                break
        else:
            folder = f"checkpoint/{alias}"
            client.log_artifacts(run_id, str(directory), folder)
            source = f"{client.get_run(run_id).info.artifact_uri}/{folder}"
            made = client.create_model_version(REGISTERED_MODEL, source, run_id, tags)
            version = str(made.version)
        client.set_registered_model_alias(REGISTERED_MODEL, alias, version)
        return version

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        if self.served:
            yield
            return
        self.root.mkdir(parents=True, exist_ok=True)
        path = self.root / "mlflow.lock"
        try:
            with FileLock(path, timeout=_LOCK_SECONDS):
                yield
        except Timeout as error:
            raise TrackingError(
                f"the tracking store must be free within {_LOCK_SECONDS:.0f} s",
                str(path),
                "End the process that holds the lock, or use a server (MLFLOW_TRACKING_URI).",
            ) from error

    def _connect(self) -> tuple[MlflowClient, str]:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        for noisy in ("alembic", "mlflow.store.db.utils", "mlflow.tracking"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
        found = client.get_experiment_by_name(self.experiment)
        if found is None:
            place = None if self.served else (self.root / "mlruns").as_uri()
            try:
                return client, str(client.create_experiment(self.experiment, place))
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = client.get_experiment_by_name(self.experiment)
        if found is None or found.lifecycle_stage != "active":
            raise TrackingError(
                "the MLflow experiment must not be deleted",
                self.experiment,
                "Restore it with `mlflow experiments restore`.",
            )
        return client, str(found.experiment_id)

    def _find(self, kind: Kind, key: str) -> list[StoredRun]:
        query = f"tags.`{KEY_TAG}` = '{key}' and tags.`{KIND_TAG}` = '{kind}'"
        runs = [
            StoredRun(run.info.run_id, run.info.status, run.info.start_time)
            for run in self._client.search_runs([self.experiment_id], query)
        ]
        return sorted(runs, key=lambda run: (run.start_time_ms, run.run_id))
