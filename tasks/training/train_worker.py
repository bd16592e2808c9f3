"""Training workers on Ray Train or in process, and their launch.

Workers share the file system of the artifact root.
"""

from __future__ import annotations

import json
import logging
import secrets
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tasks.cluster.lease import ClusterLease
from tasks.cluster.worker_errors import as_data, cluster_error, from_data
from tasks.training.strategies import make_strategy
from umim_core.config.recipe import ClusterConfig
from umim_core.errors import UmimError
from umim_core.progress import followed
from umim_core.store.artifacts import write_json
from umim_core.store.disk import not_shared
from umim_core.store.publication import STATE
from umim_core.training.train_job import TrainJob, read_summary, run_job
from umim_core.training.train_ranks import rank_and_world, ranks_where

logger = logging.getLogger("umim.train")
Worker = Callable[[], None]


def launch(job: TrainJob, lease: ClusterLease) -> dict[str, float]:
    """Run a job to its end.

    Returns:
        Steps taken, best step and score, skipped steps.
    """
    return launch_worker(partial(run_worker, job), Path(job.out), lease)


def launch_worker(worker: Worker, out: Path, lease: ClusterLease) -> dict[str, float]:
    """Call a function on every rank, and return the numbers of the summary it left."""
    state = out / STATE
    with followed(state):
        if lease.config.workers == 0:
            worker()
        else:
            with lease.room(lease.config.workers):
                _launch_ray(worker, lease.config, state / "ray")
    return read_summary(out)


def _launch_ray(worker: Worker, cluster: ClusterConfig, scratch: Path) -> None:
    from ray.exceptions import RayError
    from ray.train import ControllerError, FailureConfig, RunConfig, ScalingConfig, WorkerGroupError
    from ray.train.torch import TorchTrainer

    from tasks.training.meeting import MeetingConfig

    shutil.rmtree(scratch, ignore_errors=True)  # our state resumes; Ray's own record must not
    # Workers look for it: no cache of a file system can know a name that is random.
    meeting = scratch / secrets.token_hex(8)
    meeting.mkdir(parents=True)
    trainer = TorchTrainer(
        partial(_run_rank, worker, meeting),
        scaling_config=ScalingConfig(num_workers=cluster.workers, use_gpu=cluster.use_gpu),
        torch_config=MeetingConfig(backend="nccl" if cluster.use_gpu else "gloo"),
        run_config=RunConfig(
            name="train",
            storage_path=str(meeting),
            failure_config=FailureConfig(
                max_failures=cluster.max_restarts,
                controller_failure_limit=cluster.max_restarts,  # Ray's default never gives up
            ),
        ),
    )
    try:
        # In the main thread Ray would take over Ctrl-C for good, and lose other signals.
        thread = ThreadPoolExecutor(1, thread_name_prefix="fit")
        try:
            thread.submit(trainer.fit).result()
        finally:
            thread.shutdown(wait=False)
        _raise_recorded(meeting, cluster.workers)
    except (WorkerGroupError, ControllerError, RayError) as error:
        _raise_recorded(meeting, cluster.workers)
        rule = "the controller of a training must stay alive"  # it leads the workers
        again = "Run the same command again; it resumes from the last state."
        if isinstance(error, WorkerGroupError):  # also a typed error without the scratch folder
            rule = f"training workers may be lost at most {cluster.max_restarts} times"
        elif isinstance(error, ControllerError):
            rule = f"{cluster.workers} training workers must start"
            again = "Look at the cluster's free resources; the same command resumes."
        raise cluster_error(rule, error, again) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run_rank(worker: Worker, folder: Path) -> None:
    """Call a worker function on a Ray worker, once: Ray starts a group again after any error.

    A lost worker is worth another try, but a typed error would only come back. It goes to a
    file, and a group that finds one ends at once, all ranks together.
    """
    rank, world = rank_and_world()
    shared, errors = folder.is_dir(), _error_files(folder, world)
    if ranks_where(shared and any(path.is_file() for path in errors)):
        return
    try:
        if blind := ranks_where(not shared):  # rules, rows and states are not there either
            raise not_shared(folder, f"ranks {blind}")
        worker()
    except UmimError as error:
        if shared:
            write_json(errors[rank], as_data(error))
        raise


def _error_files(scratch: Path, world: int) -> list[Path]:
    """Return where ranks write errors; by name, for a listing may be older than the files."""
    return [scratch / f"error-{rank}.json" for rank in range(world)]


def _raise_recorded(scratch: Path, world: int) -> None:
    for path in _error_files(scratch, world):
        if path.is_file():
            raise from_data(*json.loads(path.read_text(encoding="utf-8")))


def run_worker(job: TrainJob) -> None:
    """Train on one rank; rank 0 writes checkpoint, curve and summary into the job's directory."""
    logging.getLogger("umim").setLevel(logging.INFO)
    run_job(job, partial(make_strategy, job.strategy))
