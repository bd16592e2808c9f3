"""GPUs of a named cluster, which are numbers here: a driver without one, two trainings at once."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from support.ray_nodes import head_options, node, paths
from support.servers import free_port
from support.small_recipe import least_recipe
from tasks.cluster.lease import ClusterLease
from tasks.cluster.ray_cluster import CHECKOUT
from tasks.run.checks import check_machine
from tasks.run.pipeline import side_by_side
from tasks.training import meeting
from tasks.training.train_worker import launch_worker
from umim_core.backbone.devices import has_device

pytestmark = pytest.mark.full
SECONDS = 120.0


def meet(out: Path, folder: Path) -> None:
    """Leave the number of this training's GPU, and stay until both are there."""
    import ray

    from umim_core.store.artifacts import write_json

    (number,) = ray.get_gpu_ids()
    (folder / f"gpu-{number}").touch()
    deadline = time.monotonic() + SECONDS
    while len(list(folder.glob("gpu-*"))) < 2:
        assert time.monotonic() < deadline, "the other training waits for this one"
        time.sleep(0.1)
    write_json(out / "summary.json", {"gpu": float(number)})


@pytest.mark.skipif(has_device("cuda"), reason="this machine has GPUs of its own")
def test_a_driver_without_a_gpu_trains_two_cells_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("PYTHONPATH", paths(CHECKOUT / "tests"))  # the nodes import this file
    gloo = partial(meeting.MeetingConfig, "gloo")
    monkeypatch.setattr(meeting, "MeetingConfig", lambda backend: gloo())  # no NCCL here
    port = free_port()
    cluster = {"workers": 1, "use_gpu": True, "parallel_stages": 2}
    cells = [{"backbone": "umim-docs-llama"}, {"backbone": "umim-docs-gpt2"}]
    recipe = least_recipe(cells=cells, cluster={"address": f"127.0.0.1:{port}", **cluster})
    check_machine(recipe, "umim-distill")
    options = [*head_options("127.0.0.1", port, cpus=4), "--num-gpus=2"]
    with node(tmp_path, CHECKOUT, *options), ClusterLease(recipe.cluster, tmp_path) as lease:
        outs = [tmp_path / cell.backbone for cell in recipe.cells]
        for out in outs:
            out.mkdir()
        trainings = [
            partial(launch_worker, partial(meet, out, tmp_path), out, lease) for out in outs
        ]
        summaries = side_by_side(trainings, recipe.cluster.parallel_stages)
    assert sorted(summary["gpu"] for summary in summaries) == [0.0, 1.0]
