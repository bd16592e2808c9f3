"""One cluster for all threads; the logs of one that died stay, and its error says where.

They start clusters of their own, so their file must not ask for the shared one. Their workers
import it and do not find what tests share, so it imports none of that.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import ray
from ray.exceptions import RayError

from tasks.cluster.lease import ClusterLease
from tasks.run.pipeline import side_by_side
from umim_core.config.recipe import ClusterConfig

CONFIG = ClusterConfig(cpus=1, object_store_gib=0.1)


def _seven() -> int:
    return 7


@pytest.mark.full
def test_a_cluster_outlives_the_thread_that_asked_for_it_first(tmp_path: Path) -> None:
    with ClusterLease(CONFIG, tmp_path) as lease:
        (first,) = side_by_side([lease.ensure, lease.ensure], 2)[:1]
        assert ray.get(ray.remote(_seven).remote(), timeout=120) == 7
        assert lease.ensure() is first
        assert ray.cluster_resources()["object_store_memory"] == pytest.approx(0.1 * 2**30, rel=0.1)
    assert not (tmp_path / "ray-logs").exists()


@pytest.mark.full
def test_a_dead_raylet_is_an_error_that_names_the_logs_which_stay(tmp_path: Path) -> None:
    with pytest.raises(RayError) as caught, ClusterLease(CONFIG, tmp_path) as lease:
        lease.ensure()
        (raylet,) = [p for p in psutil.Process().children() if p.name() == "raylet"]
        raylet.kill()
        ray.get(ray.remote(_seven).remote(), timeout=120)
    (kept,) = (tmp_path / "ray-logs").iterdir()
    assert (kept / "raylet.out").is_file()
    assert caught.value.__notes__ == [f"Ray's logs are in {kept}."]
    assert not ray.is_initialized()
    assert psutil.Process().children() == []
