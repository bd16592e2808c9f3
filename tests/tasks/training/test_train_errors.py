"""Typed errors of Ray workers: raised once, whatever the restarts allowed for lost workers.

Workers import this file and do not find what tests share, so it imports none of that.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from tasks.cluster.lease import ClusterLease
from tasks.training.train_worker import launch_worker
from umim_core.config.recipe import ClusterConfig
from umim_core.errors import ClusterError, NumericalError

pytestmark = pytest.mark.full
RULE, VALUE, REMEDY = "a loss must be finite", [1, 2], "Lower the learning rate."


def raise_on_rank_1(out: Path, typed: bool) -> None:
    """Leave a line per start; then one rank raises and the other waits for it."""
    import torch
    import torch.distributed as dist

    with (out / f"attempts-{dist.get_rank()}").open("a") as lines:
        lines.write("started\n")
    dist.barrier()
    if dist.get_rank() == 1:
        raise NumericalError(RULE, VALUE, REMEDY) if typed else ValueError("not ours")
    dist.all_reduce(torch.zeros(1))


@pytest.fixture(scope="module")
def lease(two_cores: None) -> Iterator[ClusterLease]:
    config = ClusterConfig(cpus=2, workers=2)
    assert config.max_restarts > 0
    with ClusterLease(config) as lease:
        lease.ensure()
        yield lease


def attempts(out: Path) -> list[int]:
    """How often each rank was started."""
    return [len((out / f"attempts-{rank}").read_text("utf-8").split()) for rank in (0, 1)]


def test_a_typed_error_is_raised_after_one_attempt(lease: ClusterLease, tmp_path: Path) -> None:
    with pytest.raises(NumericalError) as caught:
        launch_worker(partial(raise_on_rank_1, tmp_path, True), tmp_path, lease)
    assert str(caught.value) == str(NumericalError(RULE, VALUE, REMEDY))
    assert attempts(tmp_path) == [1, 1]


def test_any_other_error_has_the_restarts(lease: ClusterLease, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="may be lost at most 2 times; got ValueError: not ours"):
        launch_worker(partial(raise_on_rank_1, tmp_path, False), tmp_path, lease)
    assert attempts(tmp_path) == [3, 3]


def wait_for_the_end(out: Path) -> None:
    """Say that the group has started, and stay."""
    (out / "started").touch()
    time.sleep(600)


def kill_the_controller(out: Path) -> None:
    """Kill the process that leads a group, at once when the group has started."""
    while not (out / "started").exists():
        time.sleep(0.02)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "TrainController" in " ".join(process.cmdline()):
                process.kill()


def test_a_lost_controller_is_named(lease: ClusterLease, tmp_path: Path) -> None:
    killer = threading.Thread(target=kill_the_controller, args=(tmp_path,))
    killer.start()
    with pytest.raises(ClusterError, match="the controller of a training must stay alive"):
        launch_worker(partial(wait_for_the_end, tmp_path), tmp_path, lease)
    killer.join()
