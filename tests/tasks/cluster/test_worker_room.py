from __future__ import annotations

import threading
import time

import pytest

from tasks.cluster.lease import ClusterLease
from tasks.run.pipeline import side_by_side
from umim_core.config.recipe import ClusterConfig


@pytest.mark.parametrize(("workers", "at_once"), [(1, 2), (2, 1)])
def test_workers_of_stages_side_by_side_have_no_more_cores_than_there_are(
    two_cores: None, workers: int, at_once: int
) -> None:
    all_there = threading.Barrier(at_once, timeout=60)
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
