"""Timings are taken alone: between processes, measuring waits for computing and the reverse."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from support.lock_holders import holding
from tasks.run.stage import Metrics, StageSpec, run_stage
from umim_core.errors import LockError
from umim_core.store.locking import VARIABLE, computing, lock_file, measuring

KINDS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "measuring": measuring,
    "computing": computing,
}


@pytest.fixture(autouse=True)
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "lock"))
    return tmp_path / "lock"


def another(kind: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """Another process that holds the machine until its standard input is closed."""
    program = f"from umim_core.store.locking import {kind}\nimport sys\n"
    program += f"with {kind}():\n    print('held', flush=True)\n    sys.stdin.read()"
    return holding(program)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("measuring", "measuring"), ("measuring", "computing"), ("computing", "measuring")],
)
def test_a_run_waits_for_one_that_it_would_disturb_and_says_so(
    theirs: str, ours: str, caplog: pytest.LogCaptureFixture
) -> None:
    with another(theirs) as process:
        stdin = process.stdin
        assert stdin is not None

        def let_go() -> None:
            deadline = time.monotonic() + 60
            while "waiting for the machine" not in caplog.text and time.monotonic() < deadline:
                time.sleep(0.02)
            stdin.close()

        threading.Thread(target=let_go, daemon=True).start()
        with KINDS[ours]():
            assert process.wait(timeout=120) == 0
    assert "waiting for the machine" in caplog.text


def test_runs_that_only_compute_do_not_wait_for_each_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with another("computing"), computing():
        assert caplog.text == ""


def test_a_killed_holder_frees_the_machine() -> None:
    with another("measuring") as process:
        process.kill()
        process.wait()
        with measuring():
            assert process.returncode == -signal.SIGKILL


def test_each_user_has_a_lock_that_only_the_user_opens(lock: Path) -> None:
    with computing():
        assert lock_file() == lock
        assert lock.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("machine", KINDS.values(), ids=KINDS)
def test_a_stage_holds_the_machine_as_its_spec_says(
    tmp_path: Path, machine: Callable[[], AbstractContextManager[None]]
) -> None:
    def build(out: Path) -> Metrics:
        assert another_may_compute() == (machine is computing)
        return {}

    run_stage(tmp_path / "root", StageSpec("tiny", 1, {}, {}, machine=machine), build)


def another_may_compute() -> bool:
    """Tell whether another process could compute now, by trying the lock as it would."""
    program = "import fcntl, sys\n"
    program += "fcntl.flock(open(sys.argv[1]), fcntl.LOCK_SH | fcntl.LOCK_NB)"
    command = [sys.executable, "-c", program, str(lock_file())]
    return subprocess.run(command, capture_output=True).returncode == 0


def test_a_lock_file_that_cannot_be_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "absent" / "lock"))
    with pytest.raises(LockError, match=r"absent/lock.*Set UMIM_MACHINE_LOCK"), computing():
        pass
