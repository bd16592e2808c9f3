"""Records of a pipeline: its run, its stages, the comparison, its checkpoints.

Numbers go to the store at once, files at the end of a run, behind all numbers. What a store that is
away misses waits in memory and is written as soon as it answers; such a store costs a run ten
seconds in all, slow files aside. What is missing at the end is written when the same command runs
again, since finished stages are found and every record may be written twice: runs are found by
their key, points carry step and time.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tasks.cluster.ray_cluster import CHECKOUT
from tasks.tracking.compare_view import COMPARISON_VIEW, SOURCE_TAG, described, shared_view
from tasks.tracking.mlflow_store import (
    CALL_SECONDS,
    CREATION_SECONDS,
    UPLOAD_SECONDS,
    Owner,
    Store,
    StoreAwayError,
    owner_of,
)
from tasks.tracking.tracking_values import (
    Curve,
    RunInput,
    Status,
    StoredRun,
    fit_name,
    flatten,
    require_key,
    sqlite_address,
)
from umim_core.addresses import redacted
from umim_core.checkpoint.checkpoint_index import artifact_root
from umim_core.errors import ArtifactError, TrackingError
from umim_core.store.artifacts import directory_digest

logger = logging.getLogger("umim.tracking")
RECIPE_TAG: Final = "umim.recipe"
PREFECT_TAG: Final = "umim.prefect_flow_run"
_PATIENCE_SECONDS: Final = 10.0  # that a run may lose to a server that does not answer
_LOCKED_SECONDS: Final = 60  # that another process may hold a store without a server
_REST_SECONDS: Final = 30.0  # before it is asked again
_HURRY_SECONDS: Final = 2.0  # that a run which is being stopped, or asks again, may lose
_UPLOADS: Final = 2  # tries of each file
_OWNER_FOLDER: Final = "tracking-spool"  # former versions kept more in it
_UNFIT: Final = re.compile(r"[^\w.\-:]+")  # what MLflow refuses in the name of a metric, and spaces
_LOCAL_UI: Final = "http://127.0.0.1:5000"
_WORK: Final = "workflowType=machine_learning"


@dataclass(frozen=True)
class Pages:
    """Addresses of a pipeline's pages in MLflow."""

    run: str
    compare: str
    command: str | None

    def links(self) -> dict[str, str]:
        """Return the addresses by name; nothing where no server shows them."""
        return {} if self.command else {"MLflow": self.run, "Comparison": self.compare}

    def line(self) -> str:
        """Return in one line where a person finds the comparison."""
        return f"{self.command}, then {self.compare}" if self.command else self.compare


class Tracker:
    """Write runs to one MLflow experiment.

    A store that is away is no error. Threads may share a tracker.
    """

    def __init__(self, uri: str | None = None, root: Path | None = None) -> None:
        default = sqlite_address(CHECKOUT / "mlflow.db")
        self.uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or default
        self.root = (root or artifact_root()).resolve()
        self._store = Store(self.uri, self.root)
        self._recipes: dict[str, str] = {}  # by key of a pipeline that was opened here
        self._waiting: deque[Callable[[Store], None]] = deque()  # numbers not yet written
        self._files: list[Callable[[Store], None]] = []  # uploads for the end of a run
        self._busy = threading.Lock()
        self._longest = CALL_SECONDS if self._store.served else _LOCKED_SECONDS
        self._left, self._rests_until = max(_PATIENCE_SECONDS, self._longest), 0.0
        self._away, self._reason = False, ""  # whether the last call failed; why one did

    @property
    def owner(self) -> Owner:
        """Tags of the runs of this root and user: others of equal keys are left alone."""
        return owner_of(self.root / _OWNER_FOLDER)

    def reconnected(self) -> Tracker:
        """Return a tracker of the same store with a connection and a patience of its own."""
        return Tracker(self.uri, self.root)

    def pipeline_run(
        self,
        key: str,
        params: Mapping[str, object],
        tags: Mapping[str, str] | None = None,
        *,
        name: str | None = None,
        description: str | None = None,
    ) -> None:
        """Open the run of a pipeline, or open it again unless it is finished."""
        note = {} if description is None else {"mlflow.note.content": description}
        if tags and RECIPE_TAG in tags:
            self._recipes[key] = tags[RECIPE_TAG]
        time_ms = _now()

        def write(store: Store) -> None:
            run = self._pipeline(store, key, time_ms, name)
            new = {} if run.status == "FINISHED" else flatten(params)
            store.log(run.run_id, params=new, tags={**(tags or {}), **note})
            if run.status not in ("FINISHED", "RUNNING"):
                store.set_status(run.run_id, "RUNNING", time_ms)

        require_key(key)
        self._write(write)

    def points(self, pipeline: str, points: Sequence[tuple[str, int, float]]) -> None:
        """Add points (metric, step, value) to a pipeline; NaN and infinities are left out."""
        time_ms, named = _now(), _finite(points)
        self._write(
            lambda store: store.log(
                self._pipeline(store, pipeline, time_ms).run_id, points=named, time_ms=time_ms
            )
        )

    def stage_run(
        self,
        pipeline: str,
        stage: str,
        artifact_key: str,
        params: Mapping[str, object],
        metrics: Mapping[str, float | None],
        curves: Mapping[str, Curve] | None = None,
        artifacts: Sequence[Path] = (),
        inputs: Sequence[RunInput] = (),
        *,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Record a finished stage under its pipeline; a stage recorded before is left alone."""
        curve_points = [(n, s, v) for n, curve in (curves or {}).items() for s, v in curve]
        key, time_ms = require_key(artifact_key), _now()

        def write(store: Store) -> None:
            parent = self._pipeline(store, pipeline, time_ms).run_id
            of = {"umim.stage": stage, "mlflow.parentRunId": parent, **(tags or {})}
            name = f"{stage} {key[:8]}"
            run = store.ensure("stage", key, name, self.owner, of, time_ms=time_ms)
            # A stage shared by several pipelines has one run; each pipeline says which.
            store.log(parent, tags={f"umim.stage.{stage}.{key[:8]}": run.run_id})
            if run.status != "FINISHED":
                _describe(store, run, params, _final(metrics) + _finite(curve_points))
                store.log_inputs(run.run_id, inputs)
                store.set_status(run.run_id, "FINISHED", time_ms)

        self._write(write)
        if artifacts:
            self._files.append(
                lambda store: store.log_files(self._stage(store, key).run_id, artifacts)
            )

    def comparison_run(
        self,
        key: str,
        params: Mapping[str, object],
        metrics: Mapping[str, float | None],
        *,
        name: str | None = None,
        pipeline: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Record one flat row of the comparison, so that Compare finds everything in one run."""
        recipe = None if pipeline is None else self._recipes.get(pipeline)
        shown = described({n: v for n, v in params.items() if v is not None}, recipe)
        points, flat, time_ms = _final(metrics), flatten(shown), _now()
        title = f"{recipe}: {name or key}" if recipe else name or key

        def write(store: Store) -> None:
            labels = {SOURCE_TAG: "this run", **(tags or {})}
            if pipeline is not None:
                labels["umim.pipeline"] = self._pipeline(store, pipeline, time_ms).run_id
            run = store.ensure("comparison", key, title, self.owner, labels, time_ms=time_ms)
            if run.status != "FINISHED":
                _describe(store, run, shown, points)
                store.set_status(run.run_id, "FINISHED", time_ms)
            view = shared_view({measured for measured, _, _ in points}, flat)
            if view is not None:
                store.share_view(*view)

        require_key(key)
        self._write(write)

    def attach(self, pipeline: str, paths: Sequence[Path], *, replace: bool = True) -> None:
        """Send files or folders to keep with a pipeline at its end."""
        time_ms = _now()
        self._files.append(
            lambda store: store.log_files(
                self._pipeline(store, pipeline, time_ms).run_id, paths, replace=replace
            )
        )

    def register_checkpoint(
        self, backbone: str, directory: Path, stage_key: str, *, alias: bool = True
    ) -> None:
        """Put a checkpoint directory into the registry, as it is, and point an alias there.

        It becomes a version of the registered model ``umim``; an equal checkpoint of the same stage
        keeps its version.
        """
        require_key(stage_key)
        folder = re.sub(r"[^\w\-]+", "-", backbone)

        def send(store: Store) -> None:
            run = self._stage(store, stage_key)
            of = directory_digest(directory), backbone
            store.register(run.run_id, directory, folder, *of, alias=alias)

        self._files.append(send)

    def finish(self, pipeline: str, status: Status = "FINISHED") -> None:
        """Close a pipeline, send its files unless it was stopped, and warn of what is missing."""
        stopped, time_ms = status == "KILLED", _now()
        if stopped:
            self._left = min(self._left, _HURRY_SECONDS)

        def close(store: Store) -> None:
            run = self._pipeline(store, pipeline, time_ms)
            if run.status != "FINISHED":  # a later try of the same pipeline only found what it made
                store.set_status(run.run_id, status, time_ms)

        self._rests_until = 0.0
        self._write(close, last=True)
        if stopped:
            return
        for _ in range(0 if self._waiting else _UPLOADS):
            self._files = [send for send in self._files if not self._upload(send)]
        if self._waiting or self._files:
            logger.warning(
                "MLflow lacks a part of this run: %d records, files of %d stages or checkpoints "
                "(%s). Run the same command again once it answers: it records what is missing",
                len(self._waiting),
                len(self._files),
                self._reason,
            )

    def pages(self, pipeline: str, view: str = COMPARISON_VIEW) -> Pages | None:
        """Return where a pipeline and a view of its rows are shown; None if that is not known."""
        runs: list[tuple[str, str]] = []

        def look(store: Store) -> None:
            run = store.find("pipeline", pipeline, self.owner)
            if run is not None:
                runs.append((store.experiment_id, run.run_id))

        with self._busy:
            if self._resting() or not self._done(look, CALL_SECONDS) or not runs:
                return None
        [(experiment, run_id)] = runs
        ui = self.uri if self._store.served else _LOCAL_UI
        place = f"{redacted(ui).rstrip('/')}/#/experiments/{experiment}/runs"
        start = f"mlflow ui --backend-store-uri {shlex.quote(redacted(self.uri))}"
        return Pages(
            # Without the type of work MLflow's pages are those of prompts and traces.
            run=f"{place}/{run_id}?{_WORK}",
            compare=f"{place}?{_WORK}&compareRunsMode=CHART&viewStateShareKey={view}",
            command=None if self._store.served else start,
        )

    def _pipeline(
        self, store: Store, pipeline: str, time_ms: int, name: str | None = None
    ) -> StoredRun:
        called = name or f"pipeline {pipeline[:8]}"
        return store.ensure("pipeline", pipeline, called, self.owner, time_ms=time_ms)

    def _stage(self, store: Store, key: str) -> StoredRun:
        run = store.find("stage", key, self.owner)
        if run is None:
            raise TrackingError("files must belong to a stage that is recorded", key)
        return run

    def _write(self, call: Callable[[Store], None], *, last: bool = False) -> None:
        """Write a record behind those that wait, as far as the store answers."""
        _ = self.owner  # a disk that refuses it is an error of its own
        with self._busy:
            self._waiting.append(call)
            while self._waiting and not self._resting(last=last):
                seconds = max(1, int(min(CALL_SECONDS, self._left)))
                if not self._done(self._waiting[0], seconds):
                    return
                self._waiting.popleft()

    def _upload(self, send: Callable[[Store], None]) -> bool:
        """Return whether files need no other try."""
        with self._busy:
            return self._left >= 1 and self._done(send, UPLOAD_SECONDS, upload=True)

    def _resting(self, *, last: bool = False) -> bool:
        """Return whether the store is not asked now; the end of a run has a try of its own."""
        least = 1.0 if last else 1.0 + _HURRY_SECONDS
        return time.monotonic() < self._rests_until or self._left < least

    def _done(self, call: Callable[[Store], None], seconds: int, *, upload: bool = False) -> bool:
        """Return whether a call needs no other try: the store took it, or refuses it for ever."""
        began, connected = time.monotonic(), False
        first = min(self._longest, self._left, _HURRY_SECONDS if self._away else self._longest)
        creation = first if first < self._longest else CREATION_SECONDS
        try:
            with self._store.session(int(creation), max(1, int(first)), seconds) as store:
                connected = True
                call(store)
        except StoreAwayError as error:
            if not self._away:
                logger.warning("MLflow is away, the run goes on: %s", error)
            self._away, self._reason = True, str(error.value)
            if not (upload and connected):  # a file may take its time, and another may land
                self._left -= time.monotonic() - began
            self._rests_until = time.monotonic() + _REST_SECONDS
            return False
        except TrackingError as error:
            logger.warning("MLflow refuses a record of %s: %s", self.owner, error)
        self._away = False
        return True


def _now() -> int:
    return time.time_ns() // 1_000_000


def _describe(
    store: Store,
    run: StoredRun,
    params: Mapping[str, object],
    points: Sequence[tuple[str, int, float]],
) -> None:
    """Write parameters and points; their time is the run's start, so that it never changes."""
    store.log(run.run_id, flatten(params), points, time_ms=run.start_time_ms)


def _final(metrics: Mapping[str, float | None]) -> list[tuple[str, int, float]]:
    return _finite([(name, 0, value) for name, value in metrics.items() if value is not None])


def _finite(points: Sequence[tuple[str, int, float]]) -> list[tuple[str, int, float]]:
    return [(fit_name(name), step, x) for name, step, x in points if math.isfinite(x)]


class LiveMetrics:
    """Writes the numbers of a stage under way to the run of its pipeline, as ``live/...``.

    A finished stage has a run of its own with all of them.
    """

    def __init__(self, tracker: Tracker, pipeline: str, stage: str) -> None:
        self._tracker = tracker
        self._pipeline = pipeline
        self._prefix = f"live/{_UNFIT.sub(' ', stage)}"

    def __call__(self, points: Mapping[str, tuple[int, float]]) -> None:
        """Write points (step, value) by the name of their metric."""
        named = [(f"{self._prefix}/{name}", at, x) for name, (at, x) in points.items()]
        try:
            self._tracker.points(self._pipeline, named)
        except ArtifactError as error:  # called from a thread of its own
            logger.warning("live numbers are lost: %s", error)
