"""Training in processes of its own, as ranks of one gloo group, that can be killed for real.

The processes come from a fork server that has imported torch already, so one starts in a fraction
of a second. A target is called with the rank; its output goes to ``folder/rank-<rank>.log``.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from tasks.cluster.ray_cluster import loopback_interface

SECONDS = 240.0  # for a group to end, one that lost a rank too
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch", "transformers", "tasks.training.train_worker"])

Target = Callable[..., None]


def start_ranks(folder: Path, world: int, target: Target, *arguments: object) -> list[BaseProcess]:
    """Start ``target(rank, *arguments)`` in ``world`` processes that form a group.

    One alone forms none, as training in process does. The target stands at the top of a module.
    """
    folder.mkdir(parents=True, exist_ok=True)
    meeting = Path(tempfile.mkdtemp(dir=folder)) / "meeting"
    ranks = [
        _SERVER.Process(
            target=_rank, args=(rank, world, str(folder), str(meeting), target, *arguments)
        )
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    return ranks


def _rank(
    rank: int, world: int, folder: str, meeting: str, target: Target, *arguments: object
) -> None:
    log = os.open(Path(folder) / f"rank-{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": loopback_interface(),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
    }
    if world > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world
        )
    target(rank, *arguments)
    if world > 1:
        dist.destroy_process_group()


def exit_codes(ranks: list[BaseProcess], seconds: float = SECONDS) -> list[int | None]:
    """Wait for all; None stands for a rank that was still running and had to be killed."""
    deadline = time.monotonic() + seconds
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()  # does nothing to one that has ended
        process.join()
    return codes


def run_ranks(folder: Path, world: int, target: Target, *arguments: object) -> None:
    codes = exit_codes(start_ranks(folder, world, target, *arguments))
    logs = "\n".join(log.read_text("utf-8") for log in sorted(folder.glob("rank-*.log")))
    assert codes == [0] * world, logs
