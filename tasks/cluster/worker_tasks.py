"""Calls of functions on the workers of a cluster, with declared resources.

``run_on_workers`` makes many calls; ``call_on_worker`` makes one, of a stage that may stand beside
trainings. Ray keeps a worker for the next call, so torch and transformers are imported once per
worker and not once per stage.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

from tasks.cluster.lease import ClusterLease
from tasks.cluster.ray_cluster import LOCAL, Cluster, cluster_address
from tasks.cluster.worker_errors import cluster_error
from umim_core.backbone.devices import release_memory
from umim_core.config.recipe import ClusterConfig
from umim_core.errors import ClusterError, require
from umim_core.store.disk import not_shared

K = TypeVar("K")
R = TypeVar("R")
_WAIT_SECONDS = 1.0
_RESTARTS = 3  # of a call whose worker was lost
_here: Final = threading.Lock()  # for calls in this process: what they load and set is shared


def run_on_workers(
    lease: ClusterLease,
    jobs: Mapping[K, Callable[[], R]],
    finished: Callable[[K, R], None],
    cores: int = 1,
    *,
    writes: Path | None = None,
) -> None:
    """Make calls and hand on each result as it comes, in this thread.

    ``workers: 0`` in the cluster's configuration makes them here, one after the other; threads of
    this process take turns. Otherwise every call is a task of the cluster with so many cores, and a
    GPU where the configuration has them; as many run at a time as the cluster has room for. A
    call's threads are its cores, so its numbers do not depend on how many others run.

    Ray sends what jobs close over, so no site and no lease. They must run where ``writes`` is, a
    folder of the artifact root that they write into.
    """
    if not jobs:
        return
    if lease.config.workers == 0:
        for key, job in jobs.items():
            with _here:
                result = job()
            finished(key, result)
        return
    gpus = int(lease.config.use_gpu)
    run_on_cluster(lease, jobs, finished, cores, gpus=gpus, writes=writes, threads=cores)


def run_on_worker(
    lease: ClusterLease, job: Callable[[], R], cores: int = 1, *, writes: Path | None = None
) -> R:
    """Make one call as `run_on_workers` does, and return its result."""
    results = list[R]()
    run_on_workers(lease, {"": job}, lambda _, one: results.append(one), cores, writes=writes)
    return results[0]


def run_on_cluster(
    lease: ClusterLease,
    jobs: Mapping[K, Callable[[], R]],
    finished: Callable[[K, R], None],
    cores: int,
    *,
    gpus: int = 0,
    writes: Path | None = None,
    threads: int | None = None,
) -> None:
    """Make calls as tasks of the cluster, whatever its configuration says of workers.

    torch gets so many threads; with None it is not imported.
    """
    cluster = lease.ensure()
    import ray

    for needed, room, kind in ((cores, cluster.cpus, "cores"), (gpus, cluster.gpus, "GPUs")):
        rule = f"a task of the cluster needs {needed} {kind}"
        fits = needed <= room or not cluster.is_here
        require(fits, ClusterError, rule, room, "Name a larger cluster.")
    # Ray ends a worker after each task with a GPU by default; it would load its model every time.
    options = {"num_cpus": cores, "num_gpus": gpus, "max_calls": 0, "max_retries": _RESTARTS}
    remote = ray.remote(**options)(_call)
    waiting = {remote.remote(job, writes, threads): key for key, job in jobs.items()}
    try:
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=_WAIT_SECONDS)
            for reference in done:
                finished(waiting.pop(reference), ray.get(reference))
    except ray.exceptions.RayError as error:
        again = "Run the same command again; finished parts are kept."
        raise cluster_error("a task of the cluster must end", error, again) from error
    finally:
        for reference in waiting:
            ray.cancel(reference, force=True)


def call_on_worker(
    lease: ClusterLease, job: Callable[[], R], *, alone: bool = False, writes: Path | None = None
) -> R:
    """Make one call and return its result: on a worker, or here where that gains nothing.

    It is made here, in the caller's thread, with ``workers: 0``, and where the only worker would
    be a second process on the same cores. Otherwise it is a task of the cluster with the cores of
    ``cores_of_a_call``, which waits until workers of other stages leave room for it, or ``alone``
    with all cores of a machine and all GPUs of this one. Paths in the job are absolute.
    """
    if not calls_leave_this_process(lease.config):
        return job()
    config, cluster = lease.config, lease.ensure()
    cores = cores_of_a_machine(config) if alone else cores_of_a_call(config, cluster)
    gpus = cluster.gpus if alone else 1
    with lease.room(gpus if config.use_gpu else cores):
        return run_on_worker(lease, job, cores, writes=writes)


def calls_leave_this_process(config: ClusterConfig) -> bool:
    """Return whether workers have what this process lacks: company, a GPU or another machine."""
    apart = config.use_gpu or cluster_address(config.address) != LOCAL
    return config.workers > 1 or (config.workers == 1 and apart)


def cores_of_a_call(config: ClusterConfig, cluster: Cluster) -> int:
    """Return how many CPU cores, which are its threads, a call gets; never by ``workers``.

    A call has its share of this machine: of the stages that may run side by side, or of the GPUs.
    On a cluster elsewhere, whose machines may be of any size, it has one core.
    """
    if not cluster.is_here:
        return 1
    shares = max(1, cluster.gpus) if config.use_gpu else config.parallel_stages
    return max(1, cluster.cpus // shares)


def machines() -> list[Mapping[str, float]]:
    """Return what each living machine of the cluster offers, as Ray names it."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def cores_of_a_machine(config: ClusterConfig) -> int:
    """Return all CPU cores of the largest machine that a call fits on."""
    kind, there = "GPU" if config.use_gpu else "CPU", machines()
    cores = [int(machine.get("CPU", 0)) for machine in there if machine.get(kind, 0) >= 1]
    rule = f"the cluster must have a machine with a {kind}"
    remedy = "Name another cluster with cluster.address, or wait until it has grown."
    require(bool(cores), ClusterError, rule, f"none of {len(there)}", remedy)
    return max(1, *cores)


def _call(job: Callable[[], R], writes: Path | None, threads: int | None = None) -> R:
    if writes is not None and not writes.is_dir():
        raise not_shared(writes, f"node {socket.gethostname()}")
    if threads is not None:
        import torch

        torch.set_num_threads(threads)  # a call before this one may have had other cores
    try:
        return job()
    finally:
        release_memory()  # of a GPU that another worker may have next
