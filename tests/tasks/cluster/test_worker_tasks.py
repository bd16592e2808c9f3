"""Calls of functions: where they run, their cores, turns of threads, errors of workers."""

from __future__ import annotations

import os
import time
from itertools import pairwise
from threading import Barrier, BrokenBarrierError
from typing import Any

import pytest
import torch

from tasks.cluster.lease import ClusterLease
from tasks.cluster.ray_cluster import Cluster
from tasks.cluster.worker_tasks import (
    call_on_worker,
    calls_leave_this_process,
    cores_of_a_call,
    cores_of_a_machine,
    run_on_workers,
)
from tasks.run.side_by_side import side_by_side
from umim_core.config.recipe import ClusterConfig
from umim_core.errors import ClusterError

HERE, AWAY = "127.0.0.1:6379", "10.0.0.1:6379"


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


@pytest.mark.parametrize(
    ("config", "away"),
    [
        ({"workers": 0}, False),
        ({"workers": 0, "address": AWAY}, False),
        ({"workers": 1}, False),
        ({"workers": 1, "address": "local"}, False),
        ({"workers": 1, "address": AWAY}, True),
        ({"workers": 1, "use_gpu": True}, True),
        ({"workers": 2}, True),
    ],
)
def test_a_call_leaves_this_process_for_what_it_lacks(
    config: dict[str, Any], away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert calls_leave_this_process(ClusterConfig(**config)) is away


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
    cluster = Cluster(address, cpus=16, gpus=4, started=True)
    assert cores_of_a_call(ClusterConfig(workers=workers, **config), cluster) == cores


def _nap(seconds: float) -> tuple[float, float, int]:
    began = time.monotonic()  # of the machine: equal in all of its processes
    time.sleep(seconds)
    return began, time.monotonic(), torch.get_num_threads()


@pytest.mark.full
def test_a_call_that_is_alone_has_all_cores_and_nothing_beside_it() -> None:
    naps: list[tuple[float, float, int]] = []
    alone: list[tuple[float, float, int]] = []

    def others() -> None:
        run_on_workers(lease, _nap, dict.fromkeys(range(6), 0.5), lambda _, it: naps.append(it))

    with ClusterLease(ClusterConfig(cpus=2, workers=2, parallel_stages=2)) as lease:
        run_on_workers(lease, _nap, {0: 0.0, 1: 0.0}, lambda *_: None)  # workers are there
        side_by_side(
            [others, lambda: alone.append(call_on_worker(lease, _nap, 0.5, alone=True))], 2
        )
    [(began, ended, threads)] = alone
    assert (threads, {threads for *_, threads in naps}) == (2, {1})
    assert all(end <= began or ended <= start for start, end, _ in naps)
    naps.sort()
    assert any(after < end for (_, end, _), (after, *_) in pairwise(naps)), "others overlap"


def test_a_cluster_without_a_machine_for_a_timing_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machines = [{"CPU": 8.0}, {"CPU": 2.0, "GPU": 1.0}, {"memory": 1.0}]
    nodes = [{"Alive": True, "Resources": of} for of in machines]
    nodes.append({"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}})
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    assert cores_of_a_machine(ClusterConfig(workers=1)) == 8
    assert cores_of_a_machine(ClusterConfig(workers=1, use_gpu=True)) == 2
    del nodes[1]
    with pytest.raises(ClusterError, match="a machine with a GPU; got none of 2"):
        cores_of_a_machine(ClusterConfig(workers=1, use_gpu=True))


def _process_and_threads(_: int) -> tuple[int, int]:
    return os.getpid(), torch.get_num_threads()


@pytest.mark.full
def test_calls_one_behind_the_other_share_a_worker_and_have_their_own_cores() -> None:
    config = ClusterConfig(cpus=2, workers=2)
    with ClusterLease(config) as lease:
        found: list[tuple[int, int]] = []
        run_on_workers(lease, _process_and_threads, {0: 0}, lambda _, it: found.append(it))
        found += [call_on_worker(lease, _process_and_threads, number) for number in range(3)]
    assert [threads for _, threads in found] == [1, 2, 2, 2]
    assert len({process for process, _ in found}) == 1
    assert found[0][0] != os.getpid()
