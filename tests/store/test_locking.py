"""Locks between real processes: exclusive, waited for, and recovered from a killed holder."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import subprocess
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from support.lock_holders import holding
from umim_core.errors import LockError
from umim_core.store.locking import directory_lock

HOLD = """
import sys
from pathlib import Path
from umim_core.store.locking import directory_lock
with directory_lock(Path(sys.argv[1]), wait_seconds=0.0):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(directory: Path) -> AbstractContextManager[subprocess.Popen[str]]:
    """Another process that holds the lock until its standard input is closed."""
    return holding(HOLD, str(directory))


def test_a_second_process_is_refused_and_the_holder_named(tmp_path: Path) -> None:
    with holder(tmp_path / "x") as process:
        holds = rf"pid {process.pid} on {re.escape(socket.gethostname())} since 20\S+Z\. Wait"
        match = rf"only one process may build x at a time; got lock held by {holds}"
        with (
            pytest.raises(LockError, match=match),
            directory_lock(tmp_path / "x", wait_seconds=0.0),
        ):
            pytest.fail("the lock was given twice")


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


def test_waiting_ends_at_the_limit(tmp_path: Path) -> None:
    with holder(tmp_path / "x"):
        began = time.monotonic()
        with pytest.raises(LockError), directory_lock(tmp_path / "x", wait_seconds=0.5):
            pytest.fail("the lock was given twice")
        assert 0.5 <= time.monotonic() - began < 120


def test_the_lock_of_a_killed_process_is_recovered(tmp_path: Path) -> None:
    with holder(tmp_path / "x") as process:
        process.kill()
        process.wait()
        assert (tmp_path / ".x.lock").exists()
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


def test_a_failing_block_frees_the_lock(tmp_path: Path) -> None:
    with pytest.raises(ValueError), directory_lock(tmp_path / "x", wait_seconds=0.0):
        raise ValueError
    with holder(tmp_path / "x"):
        pass


def test_many_threads_are_inside_one_at_a_time(tmp_path: Path) -> None:
    inside: list[int] = []
    most: list[int] = []

    def work() -> None:
        for _ in range(5):
            with directory_lock(tmp_path / "x", wait_seconds=None):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.001)
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (max(most), len(most)) == (1, 20)
