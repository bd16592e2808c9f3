"""The only ``import mlflow``: a pipeline's run, its stages, the comparison and the checkpoints.

Numbers are sent when a stage ends, files at the end of a run, each once. What a store that is away
misses is sent once more at the end; what is still missing then, the same command records when it
runs again, since finished stages are found and every record may be written twice: runs are found by
their key, points carry step and time. Every call names its run, because MLflow's active run is kept
per thread and Prefect uses threads. MLflow is imported at first use.
"""

from __future__ import annotations

import getpass
import logging
import math
import os
import re
import shlex
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import quote

from tasks.cluster.ray_cluster import CHECKOUT, NO_TELEMETRY
from tasks.storage.remote_root import refusals
from tasks.tracking.compare_view import (
    AGREEMENT,
    COMPARISON_VIEW,
    MOST_ROWS,
    PLOTTED,
    SOURCE_TAG,
    comparison_view,
    described,
)
from umim_core.addresses import redacted, scrubbed
from umim_core.checkpoint.checkpoint_index import artifact_root, remote_address
from umim_core.errors import ArtifactError, LockError, TrackingError, require
from umim_core.store.artifacts import sha256_bytes
from umim_core.store.disk import write_bytes
from umim_core.store.locking import directory_lock

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

logger = logging.getLogger("umim.tracking")
Point = tuple[str, int, float]  # metric, step, value
Metrics = Mapping[str, float | None]
Table = dict[str, list[object]]  # by column
Kind = Literal["pipeline", "stage", "comparison", "harness"]
Status = Literal["FINISHED", "FAILED", "KILLED"]
RECIPE_TAG: Final = "umim.recipe"
PREFECT_TAG: Final = "umim.prefect_flow_run"
_NAME: Final = "umim"  # of the experiment, and of the registered model
_SPOOL: Final = "tracking-spool"  # former versions kept more in it
_SETTINGS: Final = {  # of MLflow and of Postgres' client, unless somebody set them
    **NO_TELEMETRY,
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # seven take minutes
    "PGCONNECT_TIMEOUT": "5",
}
_ANSWER_SECONDS: Final = 5.0  # in which a server must say that it is there
_MAKING_SECONDS: Final = 300.0  # that another process may need to make a database's tables
_REST_SECONDS: Final = 10.0  # in which a store that was away is not asked again
_DATABASES: Final = ("sqlite", "postgresql", "mysql", "mssql")
_MAX_VALUE_CHARS: Final = 500
_NOT_IN_NAMES: Final = re.compile(r"[^\w\-. /:]")
_NOT_IN_QUERIES: Final = re.compile(r"[^\w.\-@]+")
_SECRET_NAME: Final = re.compile(
    r"(^|[._-])(token|auth|password|passwd|secret|api_?key|credentials?)$", re.IGNORECASE
)


def flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Flatten nested configuration to dotted names and short text values.

    Returns:
        ``{"distill.steps": "60", "taus": "[5, 50]"}``. Values of names such as ``api_key`` are
        hidden, user names and passwords in addresses, too; long values are cut (the stage's
        manifest holds them whole).
    """
    flat: dict[str, str] = {}
    for name, value in values.items():
        full = fit_name(f"{prefix}{name}")
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{full}.")
            continue
        text = "***" if _SECRET_NAME.search(full) else scrubbed(str(value))
        flat[full] = text if len(text) <= _MAX_VALUE_CHARS else text[:_MAX_VALUE_CHARS] + "..."
    return flat


def fit_name(name: str) -> str:
    """Return a name with the signs alone that MLflow takes: ``pass@1`` is ``pass_at_1``."""
    return _NOT_IN_NAMES.sub("_", name.replace("@", "_at_"))


def sqlite_address(file: Path) -> str:
    """Return the address of a database file as SQLAlchemy reads it: ``a?b`` is ``a%3Fb``."""
    return f"sqlite:///{quote(str(file), safe='/ ')}"


class Tracker:
    """Write runs to one MLflow experiment. Threads may share a tracker."""

    def __init__(self, uri: str | None = None, root: Path | None = None) -> None:
        default = sqlite_address(CHECKOUT / "mlflow.db")
        self.uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or default
        self.root = (root or artifact_root()).resolve()
        self.experiment_id = ""  # from the first session on
        self._client: MlflowClient | None = None
        self._served = self.uri.startswith(("http://", "https://"))
        self._recipes: dict[str, str] = {}  # by key of a pipeline that was opened here
        self._missed: list[Callable[[], None]] = []
        self._files: list[Callable[[], None]] = []  # uploads for the end of a run
        self._busy = threading.Lock()
        self._rests_until = 0.0
        self._reason: object = None  # of the newest failure

    @cached_property
    def owner(self) -> dict[str, str]:
        """Tags of the runs of this root and user: others of equal keys are left alone.

        A root in object storage is one, whichever machine works on it.
        """
        address = remote_address()
        if address is not None and self.root == artifact_root():
            identity = sha256_bytes(address.rstrip("/").encode())[:32]
        else:
            identity = _root_id(self.root / _SPOOL / "root-id")
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container's user may have no name
            user = str(os.getuid())
        # MLflow's pages have a column for the second.
        return {"umim.root": identity, "mlflow.user": _NOT_IN_QUERIES.sub("_", user)}

    def pipeline_run(
        self,
        key: str,
        params: Mapping[str, object],
        tags: Mapping[str, str] | None = None,
        *,
        name: str | None = None,
    ) -> None:
        """Open the run of a pipeline, or open it again unless it is finished."""
        if tags and RECIPE_TAG in tags:
            self._recipes[key] = tags[RECIPE_TAG]
        time_ms = _now()

        def write() -> None:
            run = self._pipeline(key, time_ms, name)
            new = {} if run.info.status == "FINISHED" else params
            self._log(run, new, tags=tags)
            if run.info.status not in ("FINISHED", "RUNNING"):
                self.client.update_run(run.info.run_id, "RUNNING")

        self._write(write)

    def live(self, pipeline: str, stage: str, points: Mapping[str, tuple[int, float]]) -> None:
        """Add points (step, value) of a stage under way to its pipeline, as ``live/...``.

        A finished stage has a run of its own with all of them.
        """
        time_ms, fit = _now(), re.sub(r"[^\w.\-:]+", " ", stage)
        named = [(f"live/{fit}/{name}", step, value) for name, (step, value) in points.items()]
        self._write(
            lambda: self._log(self._pipeline(pipeline, time_ms), points=named, time_ms=time_ms),
            again=False,
        )

    def stage_run(
        self,
        pipeline: str,
        stage: str,
        key: str,
        params: Mapping[str, object],
        metrics: Metrics,
        curve: Sequence[Point] = (),
        artifacts: Sequence[Path] = (),
        *,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Record a finished stage under its pipeline; a stage recorded before is left alone."""
        points = [*curve, *_final(metrics)]
        name, time_ms = f"{stage} {key[:8]}", _now()

        def write() -> None:
            parent = self._pipeline(pipeline, time_ms)
            of = {"umim.stage": stage, "mlflow.parentRunId": parent.info.run_id, **(tags or {})}
            run = self.record("stage", key, name, params, points, of, time_ms=time_ms)
            # A stage shared by several pipelines has one run; each pipeline says which.
            self._log(parent, tags={f"umim.stage.{stage}.{key[:8]}": run.info.run_id})

        self._write(write)
        if artifacts:
            self._files.append(lambda: self.log_files(self._stage(key), artifacts))

    def comparison_run(
        self,
        pipeline: str,
        key: str,
        name: str,
        params: Mapping[str, object],
        metrics: Metrics,
        *,
        source: str = "this run",
    ) -> None:
        """Record one flat row of the comparison, so that Compare finds everything in one run."""
        recipe = self._recipes.get(pipeline)
        shown = described({n: v for n, v in params.items() if v is not None}, recipe)
        points, time_ms = _final(metrics), _now()
        title = f"{name} · {recipe}" if recipe else name

        def write() -> None:
            of = {SOURCE_TAG: source}
            of["umim.pipeline"] = self._pipeline(pipeline, time_ms).info.run_id
            self.record("comparison", key, title, shown, points, of, time_ms=time_ms)
            if (measured := {metric for metric, _, _ in points}) >= {*AGREEMENT}:
                found = self.client.search_runs(
                    [self.experiment_id], PLOTTED, max_results=MOST_ROWS
                )
                state = comparison_view(measured, [run.data.params for run in found])
                tag = f"mlflow.sharedViewState.{COMPARISON_VIEW}"  # a link can ask for it
                self.client.set_experiment_tag(self.experiment_id, tag, state)

        self._write(write)

    def attach(self, pipeline: str, paths: Sequence[Path], *, replace: bool = True) -> None:
        """Send files or folders to keep with a pipeline at its end."""
        time_ms = _now()
        self._files.append(
            lambda: self.log_files(self._pipeline(pipeline, time_ms), paths, replace=replace)
        )

    def register_checkpoint(
        self, backbone: str, directory: Path, stage_key: str, *, alias: bool = True
    ) -> None:
        """Make a stage's checkpoint a version of the registered model ``umim`` at the run's end.

        The alias of the backbone points there, if that is asked for.
        """
        name = re.sub(r"[^\w\-]+", "-", backbone)

        def send() -> None:
            client, run = self.client, self._stage(stage_key)
            if not client.search_registered_models(f"name = '{_NAME}'"):
                with _others_may_make_it():
                    client.create_registered_model(_NAME)
            run_id, folder = run.info.run_id, f"checkpoint/{name}"
            source, tags = f"{run.info.artifact_uri}/{folder}", {"umim.backbone": backbone}
            with self.alone(stage_key):
                found = client.search_model_versions(f"run_id = '{run_id}'")
                if not found:
                    client.log_artifacts(run_id, str(directory), folder)
                    make = client.create_model_version
                    found = [make(_NAME, source, run_id, tags, await_creation_for=None)]
            if alias:
                client.set_registered_model_alias(_NAME, name, str(found[0].version))

        self._files.append(send)

    def finish(self, pipeline: str, status: Status = "FINISHED") -> None:
        """Close a pipeline, send its files unless it was stopped, and warn of what is missing."""
        time_ms = _now()

        def close() -> None:
            run = self._pipeline(pipeline, time_ms)
            if run.info.status != "FINISHED":  # a later try only found what an earlier one made
                self.client.set_terminated(run.info.run_id, status, time_ms)

        self._rests_until = 0.0
        if status == "KILLED":
            self._write(close)
            return
        records, self._missed = [*self._missed, close], []
        files, self._files = self._files, []
        for record in records:
            self._write(record)
        unsent = sum(not self._write(send, again=False) for send in files)
        if self._missed or unsent:
            lacks = f"{len(self._missed)} records, files of {unsent} stages or checkpoints"
            logger.warning(
                "MLflow lacks a part of this run: %s. Run the same command again once it "
                "answers: it records what is missing",
                lacks,
            )

    def link(self, rows: str = "") -> str:
        """Say where a person finds the comparison, or the rows that a filter finds.

        It is the address, behind the command that shows it if no server does; empty if the
        experiment is not known.
        """
        if not self.experiment_id:
            return ""
        ui = redacted(self.uri) if self._served else "http://127.0.0.1:5000"
        shown = f"searchFilter={quote(rows)}" if rows else f"viewStateShareKey={COMPARISON_VIEW}"
        work = "workflowType=machine_learning"  # else MLflow shows pages of prompts and traces
        place = f"{ui.rstrip('/')}/#/experiments/{self.experiment_id}/runs"
        link = f"{place}?{work}&compareRunsMode=CHART&{shown}"
        start = f"mlflow ui --backend-store-uri {shlex.quote(redacted(self.uri))}"
        return link if self._served else f"{start}, then {link}"

    def _write(self, record: Callable[[], None], *, again: bool = True) -> bool:
        """Make one attempt to write, and return whether the store took it.

        A store that was away a moment ago is not asked: many records must not wait in turn.
        """
        with self._busy:
            if time.monotonic() >= self._rests_until:
                answered = False
                try:
                    with self.session():
                        answered = True
                        record()
                    return True
                except (TrackingError, ArtifactError, LockError) as error:  # a full disk, say
                    if error.value != self._reason:
                        logger.warning("MLflow lacks a record, the run goes on: %s", error)
                    self._reason = error.value
                    self._rests_until = 0.0 if answered else time.monotonic() + _REST_SECONDS
            if again:
                self._missed.append(record)
        return False

    @contextmanager
    def session(self) -> Iterator[None]:
        """Hold the store for a few writes: whatever refuses one is a TrackingError."""
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        try:
            if self._served:
                _ask(self.uri)
            if self._client is None:
                with _database(self.uri):
                    self._client = self._connected()
            yield
        except refusals(MlflowException, SQLAlchemyError, ImportError) as error:
            self._client = None
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            rule = "the tracking store must answer, and take what is written"
            found = scrubbed(f"{self.uri}: {reason}", self.uri)
            remedy = "Start the server or set MLFLOW_TRACKING_URI."
            raise TrackingError(rule, found, remedy) from error

    @property
    def client(self) -> MlflowClient:
        """MLflow's client, in a session."""
        if self._client is None:
            raise TrackingError("the store is used inside `with tracker.session()`")
        return self._client

    def _connected(self) -> MlflowClient:
        from mlflow import MlflowClient

        for noisy in ("alembic", "mlflow.store.db.utils", "mlflow.tracking"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
        if client.get_experiment_by_name(_NAME) is None:
            place = None if self._served else (self.root / "mlruns").as_uri()
            with _others_may_make_it():
                client.create_experiment(_NAME, place)
        experiment = client.get_experiment_by_name(_NAME)
        rule = "the MLflow experiment must not be deleted"
        remedy = "Restore it with `mlflow experiments restore`."
        require(experiment.lifecycle_stage == "active", TrackingError, rule, _NAME, remedy)
        self.experiment_id = experiment.experiment_id
        return client

    def find(self, kind: Kind, key: str) -> Run | None:
        """Return the run of (kind, key), the first if there are several."""
        tags = {"umim.key": key, "umim.kind": kind, **self.owner}
        query = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
        runs = self.client.search_runs([self.experiment_id], query)
        return min(runs, key=lambda run: (run.info.start_time, run.info.run_id), default=None)

    def _ensure(
        self, kind: Kind, key: str, name: str, tags: Mapping[str, str], time_ms: int
    ) -> Run:
        """Find the run of (kind, key) or make it, in one process of a root at a time."""
        if (run := self.find(kind, key)) is not None:
            return run
        labels = {**tags, **self.owner, "umim.key": key, "umim.kind": kind}
        with self.alone("runs"):
            return self.find(kind, key) or self.client.create_run(
                self.experiment_id, time_ms, labels, name
            )

    def alone(self, name: str) -> AbstractContextManager[None]:
        """Have one process of this root at a time in blocks of that name."""
        return directory_lock(self.root / _SPOOL / name, wait_seconds=None)

    def _pipeline(self, key: str, time_ms: int, name: str | None = None) -> Run:
        return self._ensure("pipeline", key, name or f"pipeline {key[:8]}", {}, time_ms)

    def _stage(self, key: str) -> Run:
        run = self.find("stage", key)
        if run is None:
            raise TrackingError("files must belong to a stage that is recorded", key)
        return run

    def record(
        self,
        kind: Kind,
        key: str,
        name: str,
        params: Mapping[str, object],
        points: Sequence[Point],
        tags: Mapping[str, str],
        *,
        time_ms: int,
        end_ms: int | None = None,
        tables: Mapping[str, Table] | None = None,
        files: Sequence[Path] = (),
    ) -> Run:
        """Write a run, with tables by the names of their files, and finish it, if it is not."""
        run = self._ensure(kind, key, name, tags, time_ms)
        if run.info.status != "FINISHED":
            self._log(run, params, points)
            for table_name, columns in (tables or {}).items():
                self.client.log_table(run.info.run_id, columns, table_name)
            self.log_files(run, files)
            self.client.set_terminated(run.info.run_id, "FINISHED", end_ms or time_ms)
        return run

    def _log(
        self,
        run: Run,
        params: Mapping[str, object] | None = None,
        points: Sequence[Point] = (),
        tags: Mapping[str, str] | None = None,
        time_ms: int | None = None,
    ) -> None:
        """Write what a run is described by; NaN and infinities are left out.

        Points without a time have the start of the run, so that it never changes.
        """
        from mlflow.entities import Metric, Param, RunTag

        run_id, at = run.info.run_id, run.info.start_time if time_ms is None else time_ms
        self.client.log_batch(
            run_id,
            [
                Metric(fit_name(name), float(value), at, int(step))
                for name, step, value in points
                if math.isfinite(value)
            ],
            [Param(*item) for item in flatten(params or {}).items()],
            [RunTag(*item) for item in (tags or {}).items()],
            synchronous=True,
        )

    def log_files(self, run: Run, paths: Sequence[Path], *, replace: bool = False) -> None:
        """Keep files, and folders under their own name, with a run; what it has stays."""
        run_id = run.info.run_id
        for path in paths:
            sent = f"umim.sent.{fit_name(path.name)}"  # set once all of it is there
            if replace or sent not in run.data.tags:
                if path.is_dir():
                    self.client.log_artifacts(run_id, str(path), path.name)
                else:
                    self.client.log_artifact(run_id, str(path))
                self.client.set_tag(run_id, sent, "yes")


def _now() -> int:
    return time.time_ns() // 1_000_000


def _final(metrics: Metrics) -> list[Point]:
    return [(name, 0, value) for name, value in metrics.items() if value is not None]


def _root_id(path: Path) -> str:
    if not path.is_file():
        with directory_lock(path, wait_seconds=None):
            if not path.is_file():
                write_bytes(path, uuid.uuid4().hex.encode("ascii"))
    return path.read_text(encoding="ascii")


def _ask(uri: str) -> None:
    """Ask a server whether it is there: MLflow waits minutes for the answer to a call."""
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    how = {"max_retries": 0, "timeout": _ANSWER_SECONDS, "raise_on_status": False}
    http_request(get_default_host_creds(uri), "/health", "GET", **how)


@contextmanager
def _others_may_make_it() -> Iterator[None]:
    """Take what another run of the same store has made a moment before for made."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


@contextmanager
def _database(uri: str) -> Iterator[None]:
    """Open a database once, and hold a file's while it is connected to.

    MLflow would try nine times, for 102 seconds; two processes that make its tables break it.
    """
    from sqlalchemy import create_engine, inspect
    from sqlalchemy.engine import make_url

    with ExitStack() as stack:
        if uri.lower().startswith(_DATABASES):
            url = make_url(uri)
            if url.drivername.startswith("sqlite") and url.database:
                file = Path(url.database).absolute()  # MLflow reads a%20b otherwise
                stack.enter_context(directory_lock(file, wait_seconds=_MAKING_SECONDS))
            engine = create_engine(url)
            stack.callback(engine.dispose)
            inspect(engine).get_table_names()
        yield
