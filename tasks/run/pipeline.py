"""Pipeline run: its artifact root, its run in MLflow, and the start of its stages.

Flows read as a table of contents because everything around a stage is here: the Prefect task, the
cluster lease, the MLflow run of the stage.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar, get_args

import torch
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext
from prefect.runtime import flow_run

from tasks.cluster.lease import ClusterLease
from tasks.cluster.nodes import code_identity
from tasks.cluster.stopping import on_stop
from tasks.run.checks import check_recipe, check_root
from tasks.run.prefect_runs import flow_run_context
from tasks.run.recipes import find_recipe
from tasks.run.stage import Artifact, Site, StageCall, verifying_once
from tasks.storage.remote_root import remote_root
from tasks.tracking.compare_view import adaptation_filter
from tasks.tracking.tracker import PREFECT_TAG, RECIPE_TAG, Status, Tracker
from umim_core.addresses import redacted
from umim_core.backbone.devices import release_memory
from umim_core.checkpoint.checkpoint_files import read_config
from umim_core.checkpoint.checkpoint_index import artifact_root, own_name, record_checkpoint
from umim_core.config.adaptation_recipe import AdaptationRecipe
from umim_core.config.recipe import Recipe
from umim_core.config.recipe_files import AnyRecipe
from umim_core.errors import ArtifactError, ConfigError
from umim_core.progress import listening
from umim_core.store.artifacts import json_digest
from umim_core.training.train_job import CURVE, read_curve

T = TypeVar("T")
logger = logging.getLogger("umim.pipeline")
_SHOWN = (".svg", ".md", ".html", "table.json")
R = TypeVar("R", bound=AnyRecipe)


def side_by_side(parts: Sequence[Callable[[], T]], most: int) -> list[T]:
    """Call independent functions in threads that share the cores, at most so many at a time.

    What a stage computes releases Python's lock: torch's operations, processes, Ray's workers. Each
    part gets the context of the flow, so its stages are tasks of the same Prefect run.
    """
    if most == 1 or len(parts) < 2:
        return [part() for part in parts]
    threads, failed = torch.get_num_threads(), threading.Event()

    def run(part: Callable[[], T]) -> T:
        if failed.is_set():
            raise CancelledError
        try:
            return part()
        except BaseException:
            failed.set()
            raise

    most = min(most, len(parts))
    share = max(1, threads // most)
    with ThreadPoolExecutor(most, "part", torch.set_num_threads, (share,)) as pool:
        futures = [pool.submit(copy_context().run, run, part) for part in parts]
    torch.set_num_threads(threads)  # the threads of the pool have changed it for this one, too
    outcomes = [future.exception() for future in futures]
    errors = [error for error in outcomes if not isinstance(error, CancelledError | None)]
    if errors:
        for other in errors[1:]:
            errors[0].add_note(f"Another part failed, too: {type(other).__name__}: {other}")
        raise errors[0]
    return [future.result() for future in futures]


def site_of(root: Path, recipe: AnyRecipe, lease: ClusterLease) -> Site:
    """Return where the stages of a recipe are built; backbones are measured as they are trained."""
    device = lease.config.device
    dtype = recipe.distill.backbone_dtype(device) if isinstance(recipe, Recipe) else recipe.dtype
    return Site(root, lease, dtype)


@dataclass
class PipelineRun(Generic[R]):
    recipe: R
    root: Path
    lease: ClusterLease
    tracker: Tracker
    key: str
    artifacts: list[Artifact] = field(default_factory=list)
    _registered: set[str] = field(default_factory=set)

    @property
    def site(self) -> Site:
        return site_of(self.root, self.recipe, self.lease)

    def stage(self, call: StageCall, *, label: str = "", setting: str = "") -> Artifact:
        """Run one stage, a Prefect task in a flow run, and record it in MLflow."""
        name = call.stage.name
        of = f"{label} {setting}".strip()
        shown = f"{name} {of}".strip()
        build: Callable[[], Artifact] = partial(call.build, self.site)
        if FlowRunContext.get() is not None:
            as_task = task(
                name=name, task_run_name=shown, cache_policy=NO_CACHE, persist_result=False
            )
            build = as_task(build)
        with listening(partial(self.tracker.live, self.key, shown), of):
            try:
                artifact = build()
            finally:
                release_memory()  # a worker will train on the GPU that this process measured on
        self.artifacts.append(artifact)
        self._record(artifact)
        if setting:
            checkpoint = artifact.path / "checkpoint"
            called = own_name(self.recipe.name, label, setting)
            record = record_checkpoint(self.root, called, checkpoint)
            if (remote := remote_root()) is not None:
                remote.store_record(record)
            backbone = read_config(checkpoint).backbone
            self.tracker.register_checkpoint(backbone, checkpoint, artifact.key, alias=False)
        return artifact

    def run_parallel(
        self, parts: Sequence[Callable[[], T]], *, on_workers: bool = False
    ) -> list[T]:
        """Run parts of the flow that do not depend on each other.

        Of those that compute on workers, for which the driver only waits, each worker has one.
        """
        cluster = self.recipe.cluster
        most = max(cluster.parallel_stages, cluster.workers if on_workers else 1)
        return side_by_side(parts, most)

    def register(self, backbone: str, trained: Artifact) -> None:
        """Point the backbone's alias in MLflow's registry at the first cell's checkpoint of it."""
        if backbone not in self._registered:
            self._registered.add(backbone)
            checkpoint = trained.path / "checkpoint"
            self.tracker.register_checkpoint(backbone, checkpoint, trained.key)

    def _record(self, artifact: Artifact) -> None:
        manifest = artifact.manifest()
        curve = read_curve(artifact.path) if (artifact.path / CURVE).is_file() else []
        self.tracker.stage_run(
            self.key,
            artifact.stage,
            artifact.key,
            {"config": manifest["config"], "inputs": manifest["inputs"]},
            {**artifact.metrics, "seconds": float(manifest["facts"]["seconds"])},
            [(n, int(row["step"]), row[n]) for row in curve for n in row if n != "step"],
            artifacts=_files_to_show(artifact),
            tags={"umim.digest": artifact.digest, "umim.path": str(artifact.path)},
        )

    def announce(self, result: Artifact) -> None:
        """Attach a result to the MLflow run."""
        self.tracker.attach(self.key, [result.path], replace=result.executed)

    def link(self) -> str:
        """Say where MLflow shows the run's comparison; empty if the store never answered."""
        recipe: AnyRecipe = self.recipe
        if isinstance(recipe, AdaptationRecipe):
            return self.tracker.link(adaptation_filter(recipe.task_name))
        return self.tracker.link()


@contextmanager
def open_pipeline(recipe_name: str, flow_name: str, kind: type[R]) -> Iterator[PipelineRun[R]]:
    """Open a pipeline run: recipe, root, cluster lease and MLflow parent run."""
    with flow_run_context(), _opened(recipe_name, flow_name, kind) as run:
        yield run


@contextmanager
def _opened(recipe_name: str, flow_name: str, kind: type[R]) -> Iterator[PipelineRun[R]]:
    recipe = find_recipe(recipe_name)
    if not isinstance(recipe, kind):
        (wanted,) = get_args(kind.model_fields["kind"].annotation)
        rule = f"flow {flow_name} needs a recipe of kind {wanted}"
        found = f"of kind {recipe.kind}"
        remedy = "`python -m flows recipes` lists the recipes with their kind."
        raise ConfigError(rule, f"{recipe_name}, {found}", remedy)
    check_recipe(recipe, flow_name)
    root, began = artifact_root(), time.monotonic()
    check_root(root)
    tracker = Tracker(root=root)
    params = recipe.model_dump(mode="json")
    key = json_digest([flow_name, params])
    code = code_identity()
    tags = {
        RECIPE_TAG: recipe.name,
        "umim.flow": flow_name,
        "umim.host": code.host,
        "umim.sources": code.sources,
        "umim.lock": code.lock,
        "mlflow.source.git.commit": code.commit,
        "mlflow.note.content": recipe.description,
    }
    url = _prefect_url()
    if FlowRunContext.get() is not None and flow_run.id:
        tags[PREFECT_TAG] = url or str(flow_run.id)
    if url:
        tags["mlflow.note.content"] += f"\n\n[Prefect flow run]({url})"
    tracker.pipeline_run(key, params, tags, name=f"{flow_name} {recipe.name}")
    killed = Tracker(root=root)  # a stop must not wait for what this thread writes
    with on_stop(partial(killed.finish, key, "KILLED")):
        try:
            with verifying_once(), ClusterLease(recipe.cluster, root) as lease:
                run = PipelineRun[R](recipe, root, lease, tracker, key)
                yield run
        except BaseException as error:
            # Others than Exception end a process.
            status: Status = "FAILED" if isinstance(error, Exception) else "KILLED"
            with suppress(ArtifactError):  # the first error is the one to show
                tracker.finish(key, status)
            raise
    tracker.finish(key)
    built = sum(artifact.executed for artifact in run.artifacts)
    seconds = time.monotonic() - began
    logger.info("%d stages, %d executed, in %.0f s", len(run.artifacts), built, seconds)
    if link := run.link():
        logger.info("MLflow: %s", link)


def _files_to_show(artifact: Artifact) -> list[Path]:
    """Return what people look at of a stage: its rules, tables and figures.

    Checkpoints go to the registry, reports to the run of the pipeline.
    """
    rules = artifact.path / "rules"
    files = [path for kind in _SHOWN for path in sorted(artifact.path.glob(f"*{kind}"))]
    return [*([rules] if rules.is_dir() else []), *files]


def _prefect_url() -> str | None:
    """Return the flow run's page, no password in it; None where Prefect says "None/flow-runs"."""
    url = flow_run.ui_url if FlowRunContext.get() is not None else None
    return redacted(url) if url and url.startswith(("http://", "https://")) else None
