from __future__ import annotations

import pytest

from umim_core.training import train_job
from umim_core.training.train_job import warn_of_idle_cores


def test_only_a_variable_that_limits_threads_is_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_job, "thread_count", lambda _: 4)
    for limit, grouped in (("1", False), ("4", False), (None, False), ("1", True)):
        caplog.clear()
        if limit is None:
            monkeypatch.delenv("OMP_NUM_THREADS")
        else:
            monkeypatch.setenv("OMP_NUM_THREADS", limit)
        monkeypatch.setattr("torch.distributed.is_initialized", lambda grouped=grouped: grouped)
        warn_of_idle_cores()
        warned = "at most 1 thread(s) where this machine has 4 cores" in caplog.text
        assert warned is (limit == "1" and not grouped)
