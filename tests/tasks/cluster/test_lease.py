"""A run's cluster, its own or a named one: its threads, its logs, its GPUs, its nodes.

They start clusters of their own, so their file must not ask for the shared one.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import ray
from ray.exceptions import RayError

from support.ray_nodes import head_options, node, paths
from support.servers import free_port
from support.small_recipe import least_recipe
from tasks.cluster.lease import ClusterLease
from tasks.cluster.nodes import ANSWER_SECONDS, code_identity, require_same_code, sources_digest
from tasks.cluster.ray_cluster import CHECKOUT
from tasks.run.checks import check_machine
from tasks.run.pipeline import side_by_side
from tasks.training import meeting
from tasks.training.train_worker import launch_worker
from umim_core.backbone.devices import has_device
from umim_core.config.recipe import ClusterConfig
from umim_core.errors import ClusterError

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


@pytest.mark.full
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


def test_sources_are_equal_wherever_they_lie_and_differ_by_one_byte(tmp_path: Path) -> None:
    for name in ("umim_core", "tasks", "flows"):
        shutil.copytree(CHECKOUT / name, tmp_path / name, ignore=lambda *_: ["__pycache__"])
    assert sources_digest(tmp_path) == code_identity().sources
    with (tmp_path / "tasks/cluster/lease.py").open("a", encoding="utf-8") as file:
        file.write("\n")
    assert sources_digest(tmp_path) != code_identity().sources


@pytest.mark.parametrize("other", ["sources", "lock"])
def test_a_node_with_other_code_is_named(other: str) -> None:
    ours = code_identity()
    require_same_code({"10.0.0.1": ours, "10.0.0.2": replace(ours, checkout="/srv/umim")})
    theirs = replace(ours, checkout="/srv/old", commit="a" * 40, **{other: "0" * 64})
    with pytest.raises(ClusterError, match="must run the code of the driver") as caught:
        require_same_code({"10.0.0.1": ours, "10.0.0.2": theirs})
    assert f"node 10.0.0.2: other {other}" in str(caught.value)
    assert "/srv/old at aaaaaaaaaaaa" in str(caught.value)


@pytest.mark.full
def test_nodes_with_roots_of_their_own_are_refused_in_time_and_nothing_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes have an empty disk where the root lies: they are in mount namespaces."""
    root, address = tmp_path / "root", f"127.0.0.1:{free_port()}"
    root.mkdir()
    apart = (
        "unshare",
        "--mount",
        "sh",
        "-c",
        f"mount -t tmpfs tmpfs '{root}' && exec \"$@\"",
        "sh",
    )
    if subprocess.run([*apart, "true"]).returncode:
        pytest.skip("mount namespaces need root: nodes without a shared disk were not tried")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    head = head_options("127.0.0.1", int(address.rpartition(":")[2]))
    other = (f"--address={address}", "--node-ip-address=127.0.0.1", "--num-cpus=1")
    with ExitStack() as nodes:
        nodes.enter_context(node(tmp_path, CHECKOUT, *head))
        for _ in range(2):
            nodes.enter_context(node(tmp_path, CHECKOUT, *other, enter=apart))
        began, lease = time.monotonic(), ClusterLease(ClusterConfig(address=address), root)
        with pytest.raises(ClusterError, match="must share the artifact root") as refused, lease:
            lease.ensure()
    assert len(re.findall(r"\d+\.\d+\.\d+\.\d+:\d+", str(refused.value))) == 2
    assert time.monotonic() - began < ANSWER_SECONDS + 60  # and what joining and ending takes
    assert [path.name for path in root.rglob("*")] == ["ray-logs"]
