"""Calls of one function: threads of a process take turns; errors of workers say their cause."""

from __future__ import annotations

from threading import Barrier, BrokenBarrierError

import pytest

from tasks.cluster.lease import ClusterLease
from tasks.cluster.worker_tasks import run_on_workers
from tasks.run.side_by_side import side_by_side
from umim_core.config.recipe import ClusterConfig
from umim_core.errors import ClusterError


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


@pytest.mark.full
def test_an_error_of_a_worker_that_is_none_of_ours_is_named_with_its_text() -> None:
    lease = ClusterLease(ClusterConfig(workers=1, cpus=1))
    with pytest.raises(ClusterError) as raised, lease:
        run_on_workers(lease, int, {"the job": "no number"}, lambda *_: None)
    assert raised.value.rule == "a task of the cluster must end"
    assert str(raised.value.value).startswith("ValueError: invalid literal for int()")
    assert "finished parts are kept" in raised.value.remedy
