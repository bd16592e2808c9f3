from __future__ import annotations

import pytest

from umim_core.training import train_job
from umim_core.training.train_job import warn_of_idle_cores

CORES = 4


@pytest.fixture(autouse=True)
def _cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_job, "thread_count", lambda _: CORES)


@pytest.mark.parametrize(
    ("limit", "grouped", "warned"),
    [("1", False, True), (str(CORES), False, False), (None, False, False), ("1", True, False)],
)
def test_only_a_variable_that_limits_threads_is_reported(
    limit: str | None,
    grouped: bool,
    warned: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if limit is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", limit)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: grouped)
    warn_of_idle_cores()
    assert (f"at most 1 thread(s) where this machine has {CORES} cores" in caplog.text) is warned
