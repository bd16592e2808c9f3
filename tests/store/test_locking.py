"""Locks between real processes: of a directory, and of the machine for whoever measures on it."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from support.processes import ROOT, output_of
from tasks.run.stage import Metrics, StageSpec, run_stage
from umim_core.errors import LockError
from umim_core.store.locking import VARIABLE, computing, directory_lock, lock_file, measuring

Machine = Callable[[], AbstractContextManager[None]]


@contextmanager
def holding(lock: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds a lock until its standard input is closed."""
    program = "import sys\nfrom umim_core.store.locking import *\n"
    program += f"with {lock}:\n    print('held', flush=True)\n    sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def holder(directory: Path) -> AbstractContextManager[subprocess.Popen[str]]:
    return holding(f"directory_lock(Path({str(directory)!r}), wait_seconds=0.0)")


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_a_second_process_is_refused_in_time_and_the_holder_named(
    tmp_path: Path, seconds: float
) -> None:
    with holder(tmp_path / "x") as process:
        began = time.monotonic()
        holds = rf"pid {process.pid} on {re.escape(socket.gethostname())} since 20\S+Z\. Wait"
        match = rf"only one process may build x at a time; got lock held by {holds}"
        with (
            pytest.raises(LockError, match=match),
            directory_lock(tmp_path / "x", wait_seconds=seconds),
        ):
            pytest.fail("the lock was given twice")
        assert seconds <= time.monotonic() - began < 120


def test_a_second_process_waits_until_the_first_has_ended(tmp_path: Path) -> None:
    inside, left = threading.Event(), threading.Event()

    def wait() -> None:
        with directory_lock(tmp_path / "x", wait_seconds=None):
            inside.set()
        left.set()

    with holder(tmp_path / "x") as process:
        assert process.stdin is not None
        threading.Thread(target=wait, daemon=True).start()
        assert not inside.wait(0.5)
        process.stdin.close()
        assert left.wait(120)
        assert process.wait(timeout=120) == 0
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_killed_process_is_recovered(tmp_path: Path) -> None:
    with holder(tmp_path / "x") as process:
        process.kill()
        process.wait()
        note = (tmp_path / ".x.lock").read_bytes()
    for left in (note, b""):  # killed before it wrote its note
        (tmp_path / ".x.lock").write_bytes(left)
        with directory_lock(tmp_path / "x", wait_seconds=0.0):
            assert f"pid {os.getpid()}" in (tmp_path / ".x.lock").read_text()
        assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_file_that_was_removed_meanwhile_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiter opens the file, its holder removes it, a third process makes and locks another."""
    first, third = (directory_lock(tmp_path / "x", wait_seconds=0.0) for _ in range(2))
    lock_file, meanwhile = fcntl.flock, []

    def slow_to_lock(handle: int, how: int) -> None:
        if not meanwhile:
            meanwhile.append(1)
            first.__exit__(None, None, None)
            third.__enter__()
        lock_file(handle, how)

    first.__enter__()
    monkeypatch.setattr(fcntl, "flock", slow_to_lock)
    with pytest.raises(LockError), directory_lock(tmp_path / "x", wait_seconds=0.0):
        pytest.fail("the lock was given twice")
    assert meanwhile
    third.__exit__(None, None, None)


def test_users_whom_the_umask_lets_share_a_folder_share_its_locks(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        with directory_lock(tmp_path / "x", wait_seconds=0):
            assert (tmp_path / ".x.lock").stat().st_mode & 0o777 == 0o664
    finally:
        os.umask(before)


def test_many_threads_are_inside_one_at_a_time(tmp_path: Path) -> None:
    inside: list[int] = []

    def work(_: int) -> int:
        with directory_lock(tmp_path / "x", wait_seconds=None):
            inside.append(1)
            time.sleep(0.001)
            return len(inside) - inside.pop()

    with ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(work, range(20)))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("measuring", measuring), ("measuring", computing), ("computing", measuring)],
)
def test_a_run_waits_for_one_that_it_would_disturb_and_says_so(
    theirs: str, ours: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    with holding(f"{theirs}()") as process:
        stdin, over = process.stdin, threading.Event()
        assert stdin is not None

        def let_go() -> None:
            deadline = time.monotonic() + 60
            while "waiting for the machine" not in caplog.text and time.monotonic() < deadline:
                time.sleep(0.02)
            over.set()
            stdin.close()

        threading.Thread(target=let_go, daemon=True).start()
        with ours():
            assert over.is_set(), "it did not wait"
            assert process.wait(timeout=120) == 0
    assert "waiting for the machine" in caplog.text


def test_runs_that_only_compute_do_not_wait_for_each_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with holding("computing()"), computing():
        assert caplog.text == ""


def test_each_user_has_a_lock_that_only_the_user_opens_at_a_place_that_can_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "lock"
    monkeypatch.setenv(VARIABLE, str(lock))
    with computing():
        assert lock_file() == lock
        assert lock.stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv(VARIABLE, str(tmp_path / "absent" / "lock"))
    with pytest.raises(LockError, match=r"absent/lock.*Set UMIM_MACHINE_LOCK"), computing():
        pass


@pytest.mark.parametrize("machine", [measuring, computing])
def test_a_stage_holds_the_machine_as_its_spec_says(tmp_path: Path, machine: Machine) -> None:
    def build(out: Path) -> Metrics:
        tried = "import fcntl, sys\nfcntl.flock(open(sys.argv[1]), fcntl.LOCK_SH | fcntl.LOCK_NB)"
        command = [sys.executable, "-c", tried, str(lock_file())]  # may another one compute?
        code = subprocess.run(command, capture_output=True).returncode
        assert (code == 0) == (machine is computing)
        return {}

    run_stage(tmp_path / "root", StageSpec("tiny", 1, {}, {}, machine=machine), build)


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_where_no_kernel_ends_children_the_call_does_nothing(platform: str) -> None:
    """Windows loads no library by the name None: a TypeError."""
    program = f"""
import ctypes, sys
sys.platform, ctypes.CDLL = {platform!r}, lambda name: {{}}[name]
from umim_core.store.child_processes import die_with_parent
print(die_with_parent(0))"""
    assert output_of(sys.executable, "-c", program) == "None\n"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
@pytest.mark.parametrize(("parent", "status"), [("os.getppid()", 0), ("0", -signal.SIGKILL)])
def test_a_child_whose_parent_had_ended_before_the_call_ends_too(parent: str, status: int) -> None:
    program = f"""
import os
from umim_core.store.child_processes import die_with_parent
die_with_parent({parent})"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == status
