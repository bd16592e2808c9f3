"""Independent calls of one function on the workers of a cluster, with declared resources."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from tasks.cluster.lease import ClusterLease
from tasks.cluster.stopping import park_if_stopping
from tasks.cluster.typed_errors import as_data, from_data
from umim_core.errors import ClusterError, UmimError

J = TypeVar("J")
K = TypeVar("K")
R = TypeVar("R")
_WAIT_SECONDS = 1.0
_RESTARTS = 3  # of a call whose worker was lost
_here: Final = threading.Lock()  # for calls in this process: what they load and set is shared


def run_on_workers(
    lease: ClusterLease,
    function: Callable[[J], R],
    jobs: Mapping[K, J],
    finished: Callable[[K, R], None],
    cores: int = 1,
) -> None:
    """Call a function once per job and hand on each result as it comes, in this thread.

    ``workers: 0`` in the cluster's configuration calls it here, one job after the other; threads of
    this process take turns. Otherwise every call is a task of the cluster with so many cores, and a
    GPU where the configuration has them; as many run at a time as the cluster has room for. A
    call's threads are its cores, so its numbers do not depend on how many others run.

    Args:
        lease: The cluster, started at the first need.
        function: A function of a module; workers import it.
        jobs: Its arguments, by key.
        finished: Receives key and result of each call.
        cores: CPU cores of a call.

    Raises:
        ClusterError: If a worker was lost too often, the cluster has no machine with the room, or a
            call raised an error that is no `UmimError`, which the message names.
        UmimError: What a call raised; calls under way are ended.
    """
    if not jobs:
        return
    if lease.config.workers == 0:
        for key, job in jobs.items():
            with _here:
                park_if_stopping()
                result = function(job)
            finished(key, result)
        return
    cluster = lease.ensure()
    import ray

    gpus = int(lease.config.use_gpu)
    for wanted, room, kind in ((cores, cluster.cpus, "cores"), (gpus, cluster.gpus, "GPUs")):
        if cluster.address.startswith("127.0.0.1:") and wanted > room:
            raise ClusterError(
                f"a task of the cluster needs {wanted} {kind}", room, "Name a larger cluster."
            )
    # Ray ends a worker after each task with a GPU by default; it would load its model every time.
    remote = ray.remote(num_cpus=cores, num_gpus=gpus, max_calls=0, max_retries=_RESTARTS)(_call)
    waiting = {remote.remote(function, job): key for key, job in jobs.items()}
    try:
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=_WAIT_SECONDS)
            park_if_stopping()
            for reference in done:
                finished(waiting.pop(reference), _result(ray.get(reference)))
    except ray.exceptions.RayTaskError as error:  # of no type of ours; its text is a traceback
        cause = error.cause if error.cause is not None else error
        raise ClusterError(
            "a task of the cluster must end",
            f"{type(cause).__name__}: {cause}",
            "Correct what the error names; finished parts are kept.",
        ) from error
    except ray.exceptions.RayError as error:
        raise ClusterError(
            "a task of the cluster must end",
            str(error).strip().splitlines()[0],
            "Run the same command again; finished parts are kept.",
        ) from error
    finally:
        for reference in waiting:
            ray.cancel(reference, force=True)


def _call(function: Callable[[J], R], job: J) -> tuple[R | None, dict[str, object] | None]:
    """Return a result, or a typed error as data: Ray would lose its parts."""
    try:
        return function(job), None
    except UmimError as error:
        return None, as_data(error)


def _result(answer: tuple[R | None, dict[str, object] | None]) -> R:
    result, error = answer
    if error is not None:
        raise from_data(error)
    return result  # type: ignore[return-value]  # None only where the function returns it
