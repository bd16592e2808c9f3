"""What a pipeline records: its run, its stages, the comparison, its checkpoints.

A run is found by its key before one is made, so the same command again adds nothing; what a crash
left unfinished is written again with equal values. How it is stored is ``tracking.py``'s matter.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tasks.cluster import CHECKOUT
from tasks.tracking import RunInput, Status, Store
from tasks.tracking_values import flatten, redact
from umim_core.artifacts import directory_digest
from umim_core.errors import TrackingError

logger = logging.getLogger("umim.tracking")
PREFECT_TAG: Final = "umim.prefect_flow_run"
Curve = Sequence[tuple[int, float]]
_UNFIT: Final = re.compile(r"[^\w.\-:]+")  # what MLflow refuses in the name of a metric, and spaces
_DEFAULT_UI: Final = "http://127.0.0.1:5000"


class Tracker:
    """Write runs to one MLflow experiment.

    Args:
        uri: Tracking store; None means ``MLFLOW_TRACKING_URI``, else ``mlflow.db`` (sqlite) in the
            checkout.
        root: Artifact root; None means ``UMIM_ROOT``, else ``.umim`` in the checkout. MLflow's
            files go to its ``mlruns`` folder unless a server decides.
        experiment: Name of the experiment.
        ui: Address of the MLflow pages for links; None means the server, else a local
            ``mlflow ui``.

    Raises:
        TrackingError: From every method, when the store is away or refuses. Once a server was
            away, later calls on the same tracker fail at once.
    """

    def __init__(
        self,
        uri: str | None = None,
        root: Path | None = None,
        experiment: str = "umim",
        ui: str | None = None,
    ) -> None:
        default = f"sqlite:///{CHECKOUT / 'mlflow.db'}"
        self.uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or default
        self.root = (root or Path(os.environ.get("UMIM_ROOT") or CHECKOUT / ".umim")).resolve()
        served = self.uri.startswith(("http://", "https://"))
        self.ui = redact(ui or (self.uri if served else _DEFAULT_UI)).rstrip("/")
        self._store = Store(self.uri, self.root, experiment)

    def another(self) -> Tracker:
        """Return a tracker of the same store with a connection of its own."""
        return Tracker(self.uri, self.root, self._store.experiment, self.ui)

    def points(self, run_id: str, points: Sequence[tuple[str, int, float]]) -> None:
        """Add points (metric, step, value) to a run; NaN and infinities are left out."""
        with self._store.session() as store:
            store.log(run_id, points=points, time_ms=time.time_ns() // 1_000_000)

    def pipeline_run(
        self,
        key: str,
        params: Mapping[str, object],
        tags: Mapping[str, str] | None = None,
        *,
        name: str | None = None,
        description: str | None = None,
    ) -> str:
        """Open the run of a pipeline, or find it.

        Args:
            key: Digest of the recipe; equal keys share one run.
            params: The recipe; nested values become dotted names.
            tags: Extra tags, e.g. ``{PREFECT_TAG: id}``; replaced when the run is found again.
            name: Name shown in lists.
            description: Markdown shown on the run's page (a place for links).

        Returns:
            The run's id. Close it with ``finish``.
        """
        with self._store.session() as store:
            run = store.ensure("pipeline", key, name or f"pipeline {key[:8]}")
            run_id = run.run_id
            finished = run.status == "FINISHED"
            extra = dict(tags or {})
            if description is not None:
                extra["mlflow.note.content"] = description
            store.log(run_id, params={} if finished else flatten(params), tags=extra)
            if run.status not in ("FINISHED", "RUNNING"):
                store.set_status(run_id, "RUNNING")
            return run_id

    def stage_run(
        self,
        parent: str,
        stage: str,
        artifact_key: str,
        params: Mapping[str, object],
        metrics: Mapping[str, float | None],
        curves: Mapping[str, Curve] | None = None,
        artifacts: Sequence[Path] = (),
        inputs: Sequence[RunInput] = (),
        *,
        tags: Mapping[str, str] | None = None,
    ) -> str:
        """Record a finished stage under its pipeline; a stage recorded before is left alone.

        Args:
            parent: Run id of the pipeline.
            stage: Name of the stage.
            artifact_key: Key of the stage's artifact.
            params: Its configuration.
            metrics: Final values; None is skipped.
            curves: (step, value) points by metric name.
            artifacts: Files and folders to keep with the run.
            inputs: Data sets the stage read.
            tags: Extra tags.

        Returns:
            The run's id.
        """
        with self._store.session() as store:
            name = f"{stage} {artifact_key[:8]}"
            labels = {"umim.stage": stage, "mlflow.parentRunId": parent, **(tags or {})}
            run = store.ensure("stage", artifact_key, name, labels)
            run_id = run.run_id
            # A stage shared by several pipelines has one run; each pipeline says which.
            store.log(parent, tags={f"umim.stage.{stage}.{artifact_key[:8]}": run_id})
            if run.status == "FINISHED":
                return run_id
            store.log(
                run_id,
                params=flatten(params),
                points=[(n, 0, v) for n, v in metrics.items() if v is not None]
                + [(n, s, v) for n, curve in (curves or {}).items() for s, v in curve],
                time_ms=run.start_time_ms,
            )
            store.log_inputs(run_id, inputs)
            store.log_files(run_id, artifacts)
            store.set_status(run_id, "FINISHED")
            return run_id

    def comparison_run(
        self,
        key: str,
        params: Mapping[str, object],
        metrics: Mapping[str, float | None],
        *,
        name: str | None = None,
        pipeline: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> str:
        """Record one flat row of the comparison, so that Compare finds everything in one run.

        Args:
            key: Digest of what the row was measured on.
            params: Numbers stay numbers; see ``ComparisonRow.params``.
            metrics: See ``ComparisonRow.measured``; None is skipped.
            name: What the run is called in lists; its key if None.
            pipeline: Run id of the pipeline that measured it, kept as a tag (not as the parent,
                because nested runs are folded away in the list).
            tags: Extra tags, e.g. ``{"umim.source": "shipped"}``.

        Returns:
            The run's id.
        """
        with self._store.session() as store:
            labels = {**({"umim.pipeline": pipeline} if pipeline else {}), **(tags or {})}
            run = store.ensure("comparison", key, name or key, labels)
            run_id = run.run_id
            if run.status != "FINISHED":
                points = [(n, 0, v) for n, v in metrics.items() if v is not None]
                known = {n: v for n, v in params.items() if v is not None}
                store.log(run_id, flatten(known), points, time_ms=run.start_time_ms)
                store.set_status(run_id, "FINISHED")
            return run_id

    def attach(self, run_id: str, paths: Sequence[Path]) -> None:
        """Keep files or folders with a run; equal names are replaced."""
        with self._store.session() as store:
            store.log_files(run_id, paths)

    def finish(self, run_id: str, status: Status = "FINISHED") -> None:
        """Close a run."""
        with self._store.session() as store:
            store.set_status(run_id, status)

    def register_checkpoint(
        self, backbone: str, directory: Path, run_id: str, digest: str | None = None
    ) -> str:
        """Put a checkpoint directory into the registry, as it is, and point its alias there.

        Args:
            backbone: Name of the backbone; the alias is this name with ``-`` for other signs.
            directory: The checkpoint.
            run_id: Run that made it; the files are kept with that run.
            digest: SHA-256 of the checkpoint; computed where None.

        Returns:
            The version in the registered model ``umim``; an equal checkpoint of the same run keeps
            its version.
        """
        alias = re.sub(r"[^\w\-]+", "-", backbone)
        digest = digest or directory_digest(directory)
        with self._store.session() as store:
            return store.register(run_id, directory, alias, digest, backbone)

    def run_url(self, run_id: str) -> str:
        """Return the address of a run's page."""
        with self._store.session() as store:
            place = f"experiments/{store.experiment_id}/runs/{run_id}"
        # Without it MLflow's pages are those of prompts and traces.
        return f"{self.ui}/#/{place}?workflowType=machine_learning"


class LiveMetrics:
    """Writes the numbers of a stage under way to the run of its pipeline, as ``live/...``.

    A finished stage has a run of its own with all of them. This one has a connection of its own: a
    store that is away for a moment ends the live numbers of the stage, and nothing else.

    Args:
        tracker: Says which store.
        run_id: Run of the pipeline.
        stage: Name of the stage, with what it works on.
    """

    def __init__(self, tracker: Tracker, run_id: str, stage: str) -> None:
        self._tracker = tracker.another()
        self._run_id = run_id
        self._prefix = f"live/{_UNFIT.sub(' ', stage)}"
        self._lost = False

    def __call__(self, points: Mapping[str, tuple[int, float]]) -> None:
        """Write points (step, value) by the name of their metric."""
        if self._lost:
            return
        try:
            self._tracker.points(
                self._run_id,
                [(f"{self._prefix}/{name}", step, value) for name, (step, value) in points.items()],
            )
        except TrackingError as error:
            self._lost = True
            logger.warning("no live numbers of this stage any more: %s", error)
