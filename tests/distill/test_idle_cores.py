"""The warning of a training that leaves cores idle."""

from __future__ import annotations

import pytest
import torch

from umim_core.distill.train_run import warn_of_idle_cores
from umim_core.mining.counting import thread_count

CORES = thread_count(None)


@pytest.mark.skipif(CORES < 2, reason="one core cannot be left idle")
@pytest.mark.parametrize(("threads", "warned"), [(1, True), (CORES, False)])
def test_fewer_threads_than_cores_are_reported(
    threads: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        warn_of_idle_cores()
    finally:
        torch.set_num_threads(before)
    assert (f"1 thread(s) where this machine has {CORES} cores" in caplog.text) is warned
