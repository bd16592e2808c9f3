from __future__ import annotations

import time
from functools import partial
from threading import Barrier, BrokenBarrierError
from typing import Any

import pytest

from tasks.cluster.lease import ClusterLease
from tasks.cluster.ray_cluster import Cluster
from tasks.cluster.worker_tasks import (
    cores_of_a_call,
    run_on_workers,
)
from tasks.run.pipeline import side_by_side
from umim_core.config.recipe import ClusterConfig
from umim_core.errors import ClusterError

HERE, AWAY = "127.0.0.1:6379", "10.0.0.1:6379"


def test_calls_of_two_threads_never_overlap_in_one_process() -> None:
    both = Barrier(2)
    met: dict[int, bool] = {}

    def meet() -> bool:
        try:
            both.wait(timeout=0.3)
        except BrokenBarrierError:
            return False
        return True

    def score(key: int) -> None:
        with ClusterLease(ClusterConfig(workers=0)) as lease:
            run_on_workers(lease, {key: meet}, met.__setitem__)

    side_by_side([lambda: score(0), lambda: score(1)], 2)
    assert met == {0: False, 1: False}


@pytest.mark.full
def test_an_error_of_a_worker_that_is_none_of_ours_is_named_with_its_text() -> None:
    lease = ClusterLease(ClusterConfig(workers=1, cpus=1))
    with pytest.raises(ClusterError) as raised, lease:
        run_on_workers(lease, {"the job": partial(int, "no number")}, lambda *_: None)
    assert raised.value.rule == "a task of the cluster must end"
    assert str(raised.value.value).startswith("ValueError: invalid literal for int()")
    again = "Correct what the error names, then run the same command again."
    assert raised.value.remedy == again


@pytest.mark.parametrize(
    ("address", "config", "cores"),
    [
        (HERE, {}, 16),
        (HERE, {"parallel_stages": 2}, 8),
        (HERE, {"parallel_stages": 64}, 1),
        (HERE, {"use_gpu": True}, 4),
        (AWAY, {}, 1),
    ],
)
@pytest.mark.parametrize("workers", [1, 8])
def test_a_call_has_its_share_of_this_machine_however_many_workers_there_are(
    address: str, config: dict[str, Any], cores: int, workers: int
) -> None:
    cluster = Cluster(address, cpus=16, gpus=4)
    assert cores_of_a_call(ClusterConfig(workers=workers, **config), cluster) == cores


@pytest.mark.parametrize(("workers", "at_once"), [(1, 2), (2, 1)])
def test_workers_of_stages_side_by_side_have_no_more_cores_than_there_are(
    two_cores: None, workers: int, at_once: int
) -> None:
    all_there = Barrier(at_once, timeout=60)
    inside: list[int] = []
    most = 0

    def stage() -> None:
        nonlocal most
        with lease.room(lease.config.workers):
            inside.append(1)
            most = max(most, len(inside))
            all_there.wait()
            time.sleep(0.2)  # time for one that must not be there
            inside.pop()

    with ClusterLease(ClusterConfig(cpus=2, workers=workers)) as lease:
        side_by_side([stage] * 4, 4)
    assert most == at_once
