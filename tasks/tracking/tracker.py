"""Records of a pipeline: its run, its stages, the comparison, its checkpoints.

Everything is written to the spool first; numbers go to the store at once if it answers, files at
the end of a run. A store that is away costs a run what ``Patience`` allows, and loses nothing: the
next run writes what waits, or ``python -m flows replay`` does. Runs are found by their key: the
same command adds none.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tasks.cluster.ray_cluster import CHECKOUT
from tasks.cluster.stopping import stop_deferred
from tasks.tracking.compare_view import COMPARISON_VIEW, SOURCE_TAG, described
from tasks.tracking.mlflow_store import Store
from tasks.tracking.owner import Owner, owner_of
from tasks.tracking.patience import Patience
from tasks.tracking.spool import NUMBERS, UPLOADS, Queue, Spool
from tasks.tracking.spool_writer import SpoolWriter
from tasks.tracking.tracking_values import Curve, RunInput, Status, flatten, redact, require_key
from umim_core.checkpoint.own_checkpoints import artifact_root
from umim_core.errors import ArtifactError
from umim_core.store.artifacts import directory_digest

logger = logging.getLogger("umim.tracking")
RECIPE_TAG: Final = "umim.recipe"
PREFECT_TAG: Final = "umim.prefect_flow_run"
REPLAY_COMMAND: Final = "python -m flows replay"
_UNFIT: Final = re.compile(r"[^\w.\-:]+")  # what MLflow refuses in the name of a metric, and spaces
_LOCAL_UI: Final = "http://127.0.0.1:5000"
_WORK: Final = "workflowType=machine_learning"


@dataclass(frozen=True)
class Pages:
    """Addresses of a pipeline's pages in MLflow.

    Attributes:
        run: Address of the pipeline's run.
        compare: Address of the comparison of all runs.
        command: What starts the pages at those addresses; None where a server shows them.
    """

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

    No method waits for a store that is away, nor raises because of it. Threads may share a tracker.

    Raises:
        ArtifactError: From every method that records, if the disk refuses the record.
    """

    def __init__(
        self, uri: str | None = None, root: Path | None = None, experiment: str = "umim"
    ) -> None:
        default = f"sqlite:///{CHECKOUT / 'mlflow.db'}"
        self.uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or default
        self.root = (root or artifact_root()).resolve()
        self._store = Store(self.uri, self.root, experiment)
        self._spool = Spool(self.root)
        self._writer = SpoolWriter(self._store, self._spool)
        self._recipes: dict[str, str] = {}  # by key of a pipeline that was opened here

    @property
    def owner(self) -> Owner:
        """Tags of the runs of this root and user: others of equal keys are left alone."""
        return owner_of(self._spool.folder)

    def reconnected(self) -> Tracker:
        """Return a tracker of the same store with a connection and a patience of its own."""
        return Tracker(self.uri, self.root, self._store.experiment)

    def pipeline_run(
        self,
        key: str,
        params: Mapping[str, object],
        tags: Mapping[str, str] | None = None,
        *,
        name: str | None = None,
        description: str | None = None,
    ) -> None:
        """Open the run of a pipeline, or open it again unless it is finished.

        Raises:
            TrackingError: If the key has signs that a query cannot hold.
        """
        note = {} if description is None else {"mlflow.note.content": description}
        if tags and RECIPE_TAG in tags:
            self._recipes[key] = tags[RECIPE_TAG]
        self._record("open", key, name=name, params=flatten(params), tags={**(tags or {}), **note})

    def points(self, pipeline: str, points: Sequence[tuple[str, int, float]]) -> None:
        """Add points (metric, step, value) to a pipeline; NaN and infinities are left out."""
        self._record("points", pipeline, points=_finite(points))

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
        """Record a finished stage under its pipeline; a stage recorded before is left alone.

        Args:
            pipeline: Key of the pipeline.
            stage: Name of the stage.
            artifact_key: Key of the stage's artifact, and of the run.
            params: Its configuration.
            metrics: Final values; None is skipped.
            curves: (step, value) points by metric name.
            artifacts: Files and folders to keep with the run; they are sent at its end.
            inputs: Data sets the stage read.
            tags: Extra tags.
        """
        curve_points = [(n, s, v) for n, curve in (curves or {}).items() for s, v in curve]
        key = require_key(artifact_key)
        self._record(
            "stage",
            pipeline,
            stage=stage,
            key=key,
            params=flatten(params),
            points=_final(metrics) + _finite(curve_points),
            inputs=[vars(entry) for entry in inputs],
            tags=dict(tags or {}),
        )
        if artifacts:
            files = [str(path) for path in artifacts]
            self._record("files", pipeline, UPLOADS, key=key, files=files)

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
        self._record(
            "comparison",
            pipeline,
            key=require_key(key),
            name=f"{recipe}: {name or key}" if recipe else name or key,
            params=flatten(shown),
            points=_final(metrics),
            tags={SOURCE_TAG: "this run", **(tags or {})},
        )

    def attach(self, pipeline: str, paths: Sequence[Path]) -> None:
        """Send files or folders to keep with a pipeline at its end; equal names are replaced."""
        self._record("files", pipeline, UPLOADS, files=[str(path) for path in paths])

    def register_checkpoint(
        self,
        backbone: str,
        directory: Path,
        stage_key: str,
        digest: str | None = None,
        *,
        alias: bool = True,
    ) -> None:
        """Put a checkpoint directory into the registry, as it is, and point an alias there.

        It becomes a version of the registered model ``umim``; an equal checkpoint of the same stage
        keeps its version.
        """
        self._record(
            "checkpoint",
            None,
            UPLOADS,
            key=require_key(stage_key),
            directory=str(directory),
            folder=re.sub(r"[^\w\-]+", "-", backbone),
            alias=alias,
            digest=digest or directory_digest(directory),
            backbone=backbone,
        )

    def finish(self, pipeline: str, status: Status = "FINISHED") -> None:
        """Close a pipeline, send its files unless it was stopped, say what waits or was refused."""
        if status == "KILLED":
            self._writer.hurry()
        self._record("status", pipeline, last=True, status=status)
        if status != "KILLED":
            self._writer.upload()
        self._spool.warn(self._writer.reason, REPLAY_COMMAND)

    def replay(self) -> tuple[list[Path], str]:
        """Write what waits, of every run of this root, if the store answers; try more than once.

        Returns:
            The files of the records that still wait, and why they do.
        """
        writer = SpoolWriter(self._store, self._spool, Patience.of_a_replay())
        writer.write(last=True)
        writer.upload()
        return self._spool.all_waiting(), writer.reason

    def refused(self) -> list[Path]:
        """Return the files of the records that were refused, of every run of this root."""
        return self._spool.refused()

    def pages(self, pipeline: str, view: str = COMPARISON_VIEW) -> Pages | None:
        """Return where a pipeline and a view of its rows are shown; None if that is not known."""

        def places(store: Store) -> tuple[str, str] | None:
            run = store.find("pipeline", pipeline, self.owner)
            return None if run is None else (store.experiment_id, run.run_id)

        found = self._writer.ask(places)
        if found is None:
            return None
        experiment, run_id = found
        ui = self.uri if self._store.served else _LOCAL_UI
        place = f"{redact(ui).rstrip('/')}/#/experiments/{experiment}/runs"
        start = f"mlflow ui --backend-store-uri {shlex.quote(redact(self.uri))}"
        return Pages(
            # Without the type of work MLflow's pages are those of prompts and traces.
            run=f"{place}/{run_id}?{_WORK}",
            compare=f"{place}?{_WORK}&compareRunsMode=CHART&viewStateShareKey={view}",
            command=None if self._store.served else start,
        )

    def _record(
        self,
        kind: str,
        pipeline: str | None,
        queue: Queue = NUMBERS,
        *,
        last: bool = False,
        **fields: object,
    ) -> None:
        key = None if pipeline is None else require_key(pipeline)
        time_ms = time.time_ns() // 1_000_000
        with stop_deferred():
            of = {"kind": kind, "pipeline": key, "time_ms": time_ms, "owner": self.owner}
            self._spool.add({**of, **fields}, queue)
            if queue == NUMBERS:
                self._writer.write(last=last)


def _final(metrics: Mapping[str, float | None]) -> list[tuple[str, int, float]]:
    return _finite([(name, 0, value) for name, value in metrics.items() if value is not None])


def _finite(points: Sequence[tuple[str, int, float]]) -> list[tuple[str, int, float]]:
    return [point for point in points if math.isfinite(point[2])]


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
