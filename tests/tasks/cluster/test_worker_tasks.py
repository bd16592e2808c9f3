from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any

import pytest
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayTaskError
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

from tasks.cluster.lease import ClusterLease, _call, cores_of_a_call
from tasks.cluster.ray_cluster import Cluster
from tasks.cluster.worker_errors import cluster_error
from tasks.data.tokenizing import threads_per_job
from tasks.run.pipeline import side_by_side
from umim_core.config.recipe import ClusterConfig
from umim_core.errors import ClusterError, NumericalError

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
            met.update(lease.run({key: meet}))

    side_by_side([lambda: score(0), lambda: score(1)], 2)
    assert met == {0: False, 1: False}


def refuse() -> None:
    raise NumericalError("a loss must be finite", [1, 2], "Lower the learning rate.")


@pytest.mark.full
def test_an_error_of_a_worker_is_itself_if_it_is_typed_and_else_named_with_its_text() -> None:
    with ClusterLease(ClusterConfig(workers=1, cpus=1)) as lease:
        with pytest.raises(NumericalError) as typed:
            dict(lease.run({"the job": refuse}))
        with pytest.raises(ClusterError) as raised:
            dict(lease.run({"the job": partial(int, "no number")}))
    assert str(typed.value) == "a loss must be finite; got [1, 2]. Lower the learning rate."
    assert type(typed.value) is NumericalError
    assert raised.value.rule == "a task of the cluster must end"
    assert str(raised.value.value).startswith("ValueError: invalid literal for int()")


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
def test_a_call_has_its_share_of_this_machine_however_many_workers_there_are(
    address: str, config: dict[str, Any], cores: int
) -> None:
    cluster = Cluster(address, cpus=16, gpus=4)
    shares = {cores_of_a_call(ClusterConfig(workers=n, **config), cluster) for n in (1, 8)}
    assert shares == {cores}


def test_a_worker_that_does_not_see_the_folder_to_write_into_writes_nothing(tmp_path: Path) -> None:
    unseen = tmp_path / "root"
    with pytest.raises(ClusterError, match=rf"must share the artifact root; got {unseen}, which"):
        _call(partial(Path.mkdir, unseen / "x", parents=True), unseen)
    assert not unseen.exists()
    assert _call(partial(int, "7"), tmp_path) == 7


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


RULE, AGAIN = "workers must stay alive", "Run the same command again."
LONG = "; ".join(f"field {number} must be a number" for number in range(40))


def task_error(cause: Exception) -> RayTaskError:
    """As `ray.get` raises it: a worker's error, with a traceback as its text."""
    text = f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n{cause!r}'
    raised: RayTaskError = RayTaskError("f", text, cause).as_instanceof_cause()
    return raised


@pytest.mark.parametrize(
    "error",
    [
        task_error(ValueError(LONG)),
        WorkerGroupError("...", {0: ValueError(LONG), 1: ValueError("later")}),
        ControllerError(task_error(ValueError(LONG))),
    ],
)
def test_the_first_cause_is_shown_whole_and_is_to_be_corrected(error: Any) -> None:
    found = cluster_error(RULE, error, AGAIN)
    assert isinstance(found, ClusterError) and str(found.value) == f"ValueError: {LONG}"
    assert found.__notes__ == [f"ValueError: {LONG}"]
    assert found.remedy.startswith("Correct what the error names")


@pytest.mark.parametrize(
    "cause", [NodeDiedError("node 10.0.0.2 is gone\nits pid was 7"), OutOfMemoryError("95 % used")]
)
def test_a_lost_worker_is_no_fault_of_the_recipe(cause: Exception) -> None:
    wrapped = WorkerGroupError("...", {0: WorkerHealthCheckFailedError("no answer", cause)})
    for error in (cause, wrapped):
        found = cluster_error(RULE, error, AGAIN)
        assert found.remedy == AGAIN
        assert str(cause) in "\n".join([str(found), *getattr(found, "__notes__", [])])


def test_a_cluster_without_a_living_core_is_a_cluster_error() -> None:
    with pytest.raises(ClusterError, match=r"must be alive and offer CPUs; got 2 nodes"):
        threads_per_job(1, [0, 0])
