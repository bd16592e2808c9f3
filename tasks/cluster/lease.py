"""One Ray cluster per pipeline run, started when the first stage needs it, and calls on it.

Ray keeps a worker for the next call, so torch and transformers are imported once per worker and not
once per stage. Ray sends what jobs close over, so they hold no site and no lease; paths in them are
absolute.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final, Self, TypeVar

from tasks.cluster.nodes import check_nodes
from tasks.cluster.ray_cluster import LOCAL, Cluster, cluster_address, ray_cluster
from tasks.cluster.worker_errors import cluster_error
from umim_core.backbone.devices import release_memory
from umim_core.config.recipe import ClusterConfig
from umim_core.errors import ClusterError, UmimError, require
from umim_core.store.disk import not_shared

logger = logging.getLogger("umim.cluster")
K = TypeVar("K")
R = TypeVar("R")
_WAIT_SECONDS: Final = 1.0
_RESTARTS: Final = 3  # of a call whose worker was lost
_here: Final = threading.Lock()  # for calls in this process: what they load and set is shared


class ClusterLease:
    """Hold a cluster for the length of a ``with`` block; a run that only finds things starts none.

    ``ray-logs`` of the root, which every node sees, receives Ray's logs where a cluster's or an
    unforeseen error ends the block; the error names the place.
    """

    def __init__(self, config: ClusterConfig, root: Path | None = None) -> None:
        self.config = config
        self._logs = None if root is None else root / "ray-logs"
        self._stack = ExitStack()
        self._cluster: Cluster | None = None
        self._starting = threading.Lock()  # stages may ask side by side
        self._room = threading.Condition()
        self._taken = 0  # cores or GPUs that workers of stages have now

    def ensure(self) -> Cluster:
        """Return the running cluster, starting or joining it at the first call."""
        with self._starting:
            if self._cluster is None:
                config = self.config
                size = round(config.object_store_gib * (1 << 30))
                with ExitStack() as opened:
                    cluster = opened.enter_context(
                        ray_cluster(config.cpus, config.address, object_store_bytes=size)
                    )
                    if cluster.joined and self._logs is not None:
                        check_nodes(self._logs)
                    self._stack.push(opened.pop_all())
                self._cluster = cluster
            return self._cluster

    @contextmanager
    def room(self, needed: int) -> Iterator[Cluster]:
        """Have room for so many GPUs, or cores where none are used; stages wait for each other.

        Ray itself would let the second group of workers fail after waiting for a minute.
        """
        cluster, room = self.ensure(), math.inf  # one of others may still grow
        if cluster.is_here:
            kind, room = ("GPUs", cluster.gpus) if self.config.use_gpu else ("cores", cluster.cpus)
            rule = f"{needed} workers need as many {kind}"
            remedy = "Lower cluster.workers, or name a larger cluster with cluster.address."
            require(needed <= room, ClusterError, rule, room, remedy)
        with self._room:
            if self._taken + needed > room:
                logger.info("waiting until workers of other stages leave room for %d more", needed)
            self._room.wait_for(lambda: self._taken + needed <= room)
            self._taken += needed
        try:
            yield cluster
        finally:
            with self._room:
                self._taken -= needed
                self._room.notify_all()

    @property
    def calls_leave(self) -> bool:
        """Whether workers have what this process lacks: company, a GPU or another machine."""
        config = self.config
        apart = config.use_gpu or cluster_address(config.address) != LOCAL
        return config.workers > 1 or (config.workers == 1 and apart)

    def call(self, job: Callable[[], R], *, alone: bool = False, writes: Path | None = None) -> R:
        """Make one call and return its result: on a worker, or here where that gains nothing.

        It is made here, in the caller's thread, with ``workers: 0``, and where the only worker
        would be a second process on the same cores. Otherwise it waits until workers of other
        stages leave room for it. It has its share of this machine, of the stages that may run side
        by side or of the GPUs, however many workers there are, and one core of a cluster elsewhere;
        or ``alone`` all cores of a machine and all GPUs of this one.
        """
        if not self.calls_leave:
            return job()
        cluster, config = self.ensure(), self.config
        cores = cores_of_a_machine(config) if alone else cores_of_a_call(config, cluster)
        gpus = cluster.gpus if alone else 1
        with self.room(gpus if config.use_gpu else cores):
            [(_, result)] = self.run({"": job}, cores, writes=writes)
        return result

    def run(
        self, jobs: Mapping[K, Callable[[], R]], cores: int = 1, *, writes: Path | None = None
    ) -> Generator[tuple[K, R], None, None]:
        """Make calls and yield each result as it comes.

        ``workers: 0`` in the cluster's configuration makes them here, one after the other; threads
        of this process take turns. Otherwise every call is a task of the cluster with so many
        cores, and a GPU where the configuration has them; as many run at a time as the cluster has
        room for. A call's threads are its cores, so its numbers do not depend on how many others
        run. They must run where ``writes`` is, a folder of the artifact root.
        """
        if self.config.workers:
            gpus = int(self.config.use_gpu)
            yield from self.run_tasks(jobs, cores, gpus=gpus, writes=writes, threads=cores)
            return
        for key, job in jobs.items():
            with _here:
                result = job()
            yield key, result

    def run_tasks(
        self,
        jobs: Mapping[K, Callable[[], R]],
        cores: int,
        *,
        gpus: int = 0,
        writes: Path | None = None,
        threads: int | None = None,
    ) -> Generator[tuple[K, R], None, None]:
        """Make calls as tasks of the cluster, whatever its configuration says of workers.

        torch gets so many threads; with None it is not imported.
        """
        if not jobs:
            return
        cluster = self.ensure()
        import ray

        for needed, room, kind in ((cores, cluster.cpus, "cores"), (gpus, cluster.gpus, "GPUs")):
            rule = f"a task of the cluster needs {needed} {kind}"
            fits = needed <= room or not cluster.is_here
            require(fits, ClusterError, rule, room, "Name a larger cluster.")
        # Ray ends a worker after each task with a GPU by default; and would load its model anew.
        options = {"num_cpus": cores, "num_gpus": gpus, "max_calls": 0, "max_retries": _RESTARTS}
        remote = ray.remote(**options)(_call)
        waiting = {remote.remote(job, writes, threads): key for key, job in jobs.items()}
        try:
            while waiting:
                done, _ = ray.wait(list(waiting), timeout=_WAIT_SECONDS)
                for reference in done:
                    yield waiting.pop(reference), ray.get(reference)
        except ray.exceptions.RayError as error:
            again = "Run the same command again; finished parts are kept."
            raise cluster_error("a task of the cluster must end", error, again) from error
        finally:
            for reference in waiting:
                ray.cancel(reference, force=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        foreseen = isinstance(error, UmimError) and not isinstance(error, ClusterError)
        logs = None if self._cluster is None else self._cluster.logs
        if isinstance(error, Exception) and not foreseen and logs and self._logs:
            moment = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
            kept = self._logs / f"{moment}-{os.getpid()}"
            with suppress(OSError):  # files that went meanwhile, a full disk: what can be copied
                shutil.copytree(logs, kept, ignore_dangling_symlinks=True, dirs_exist_ok=True)
            if kept.is_dir():
                error.add_note(f"Ray's logs are in {kept}.")
        self._stack.close()
        self._cluster = None


def cores_of_a_call(config: ClusterConfig, cluster: Cluster) -> int:
    if not cluster.is_here:  # its machines may be of any size
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
