"""Calls of one function without a cluster: threads of a process take turns."""

from __future__ import annotations

from threading import Barrier, BrokenBarrierError

from tasks.cluster.lease import ClusterLease
from tasks.cluster.worker_tasks import run_on_workers
from tasks.run.side_by_side import side_by_side
from umim_core.config.recipe import ClusterConfig


def test_calls_of_two_threads_never_overlap_in_one_process() -> None:
    both = Barrier(2)
    met: dict[int, bool] = {}

    def meet(_: int) -> bool:
        try:
            both.wait(timeout=0.3)
        except BrokenBarrierError:
            return False
        return True

    def score(key: int) -> None:
        with ClusterLease(ClusterConfig(workers=0)) as lease:
            run_on_workers(lease, meet, {key: key}, met.__setitem__)

    side_by_side([lambda: score(0), lambda: score(1)], 2)
    assert met == {0: False, 1: False}
