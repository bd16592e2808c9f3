"""SIGKILL of one of two Ray workers: the run ends in time, with the equal result or a ClusterError.

Each run is a driver in a process of its own, so that a hang would end at the time limit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.tiny_training import CONFIG, Run, train_rank
from support.training_processes import run_ranks

CHECKOUT = Path(__file__).resolve().parents[3]
SECONDS = 900.0  # a cluster, two groups of workers and twelve steps on a machine ten times too busy
KILL_RANK, KILL_BATCH = 1, 8
PROGRAM = """
import sys
from pathlib import Path
from tasks.cluster.lease import ClusterLease
from tasks.training.train_worker import launch_worker
from support.tiny_training import train_ray_rank
from umim_core.config.recipe import ClusterConfig
from umim_core.errors import ClusterError
folder, strategy, restarts, kill_rank, kill_batch = sys.argv[1:]
config = ClusterConfig(cpus=2, workers=2, strategy=strategy, max_restarts=int(restarts))
fields = {
    "folder": folder, "strategy": strategy, "kill_rank": kill_rank, "kill_batch": kill_batch
}
with ClusterLease(config) as lease:
    try:
        launch_worker(train_ray_rank, fields, Path(folder), lease)
    except ClusterError as error:
        print("ClusterError:", error)
"""
pytestmark = pytest.mark.full


def drive(folder: Path, strategy: str, restarts: int) -> str:
    """Train with one worker killed; return what the driver printed."""
    paths = [str(CHECKOUT), str(CHECKOUT / "tests")]
    command = [sys.executable, "-c", PROGRAM, folder, strategy, restarts, KILL_RANK, KILL_BATCH]
    out = folder / "driver.log"  # a file: Ray's daemons would hold a pipe open
    with out.open("w", encoding="utf-8") as log:
        done = subprocess.run(
            list(map(str, command)),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
        )
    text = out.read_text("utf-8")
    assert done.returncode == 0, text
    return text


def attempts(folder: Path) -> list[int]:
    """How often each rank was started."""
    return [len((folder / f"attempts-{rank}").read_text().splitlines()) for rank in (0, 1)]


@pytest.mark.parametrize("strategy", ["ddp", "deepspeed"])
def test_a_killed_worker_is_replaced_and_the_result_is_that_of_an_undisturbed_run(
    tmp_path: Path, strategy: str
) -> None:
    assert "ClusterError" not in drive(tmp_path, strategy, 1)
    assert attempts(tmp_path) == [2, 2], "nobody was killed"
    undisturbed = Run(tmp_path / "undisturbed" / "state", strategy=strategy)
    run_ranks(tmp_path / "undisturbed", 2, train_rank, undisturbed)
    assert Run(tmp_path / "state", strategy=strategy).final() == undisturbed.final()


def test_a_killed_worker_too_many_is_a_cluster_error_in_time(tmp_path: Path) -> None:
    assert "ClusterError: training workers may be lost at most 0 times" in drive(tmp_path, "ddp", 0)
    assert attempts(tmp_path) == [1, 1]
    last = max((tmp_path / "state").glob("step-*/manifest.json")).parent.name
    assert int(last.removeprefix("step-")) < CONFIG.max_steps
