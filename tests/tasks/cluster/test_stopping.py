"""One way to stop: whatever a process is busy with, it ends in seconds and leaves nothing behind.

Every run is a process of its own that says ``ready`` when it may be stopped.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from support.busy_machine import within

CHECKOUT = Path(__file__).resolve().parents[3]
SECONDS = 5.0
HEAD = """
import collections, hashlib, itertools, multiprocessing, os, pathlib, signal, subprocess, sys
import tempfile, threading, time
from tasks.cluster.stopping import on_stop, resuming_at, stop_deferred, stoppable
notes = pathlib.Path(sys.argv[1])
def ready():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    folder = tempfile.mkdtemp(prefix=f"umim-ray-{os.getpid()}-", dir="/tmp")
    print(child.pid, folder, flush=True)
    return child
"""
BUSY = {
    "in Python": "while True: time.sleep(0.01)",
    "in a C call that returns to no signal handler": "hashlib.pbkdf2_hmac('sha1', b'', b'', 10**9)",
    "waiting for a thread": "threading.Thread(target=time.sleep, args=(600,)).run()",
}
NEVER = "collections.deque(itertools.repeat(0), maxlen=0)"  # no other thread ever runs


def program(*lines: str) -> str:
    """A run of these lines, in which it may be stopped."""
    body = "\n".join(f"    {line}" for line in lines)
    return f"{HEAD}\nwith stoppable(), resuming_at(lambda: 7):\n{body}\n"


@contextmanager
def running(code: str, notes: Path) -> Iterator[tuple[subprocess.Popen[str], psutil.Process, Path]]:
    """Start a run; gives it, its child and its folder, and asserts that the latter two go."""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(notes)],
        cwd=CHECKOUT,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        pid, folder = run.stdout.readline().split()
        child, guard = psutil.Process(int(pid)), family(run)
        try:
            yield run, child, Path(folder)
            assert within(
                SECONDS, lambda: not child.is_running() and not Path(folder).exists(), *guard
            )
        finally:
            run.kill()


def family(run: subprocess.Popen[str]) -> list[int]:
    """Return the numbers of a run and of its children: its guard is one."""
    return [run.pid, *(child.pid for child in psutil.Process(run.pid).children())]


def stop(run: subprocess.Popen[str], number: signal.Signals) -> tuple[int, str]:
    """Send a signal; return the status and what the run said, at most five seconds later."""
    pids = family(run)
    run.send_signal(number)
    assert within(SECONDS, lambda: run.poll() is not None, *pids)
    assert run.stderr is not None
    return run.returncode, run.stderr.read()


@pytest.mark.parametrize("busy", BUSY.values(), ids=BUSY)
def test_term_ends_a_run_with_one_line_and_leaves_nothing(busy: str, tmp_path: Path) -> None:
    with running(program("ready()", busy), tmp_path) as (run, _, _):
        assert stop(run, signal.SIGTERM) == (
            143,
            "stopped; the same command continues at step 7\n",
        )


def test_ctrl_c_ends_a_run_likewise(tmp_path: Path) -> None:
    with running(program("ready()", BUSY["in Python"]), tmp_path) as (run, _, _):
        assert stop(run, signal.SIGINT)[0] == 130


@pytest.mark.full
def test_a_run_that_lets_no_thread_run_is_killed(tmp_path: Path) -> None:
    with running(program("ready()", NEVER), tmp_path) as (run, _, _):
        process = psutil.Process(run.pid)
        begun = process.cpu_times().user
        while process.cpu_times().user < begun + 0.2:  # until it is in the call for certain
            time.sleep(0.02)
        status, said = stop(run, signal.SIGTERM)
    assert (status, said) == (-signal.SIGKILL, "stopped; the same command continues\n")


def test_a_killed_run_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    with running(program("ready()", BUSY["in Python"]), tmp_path) as (run, child, folder):
        run.kill()
        assert run.wait() == -signal.SIGKILL
    assert not child.is_running()
    assert not folder.exists()


def test_whoever_must_hear_of_a_stop_hears_and_one_that_hangs_is_not_waited_for(
    tmp_path: Path,
) -> None:
    code = program(
        "with on_stop((notes / 'told').touch), on_stop(threading.Event().wait):",
        "    ready()",
        f"    {BUSY['in Python']}",
    )
    with running(code, tmp_path) as (run, _, _):
        assert stop(run, signal.SIGTERM)[0] == 143
    assert (tmp_path / "told").exists()


@pytest.mark.parametrize("call", ["write()", "threading.Thread(target=write, daemon=True).start()"])
def test_a_block_that_must_not_be_disturbed_is_finished_and_nothing_after_it(
    tmp_path: Path, call: str
) -> None:
    code = program(
        "lock = threading.Lock()",
        "def write():",
        "    with stop_deferred(), lock:",
        "        ready().wait()  # a stop kills it first",
        "        time.sleep(0.2)",
        "        (notes / 'written').touch()",
        "    (notes / 'too far').touch()",
        "def tell():",
        "    with stop_deferred(), lock: (notes / 'told').touch()",
        "    time.sleep(0.2)",
        "with on_stop(tell):",
        f"    {call}",
        "    time.sleep(600)",
    )
    with running(code, tmp_path) as (run, _, _):
        assert stop(run, signal.SIGTERM)[0] == 143
    assert sorted(path.name for path in tmp_path.iterdir()) == ["told", "written"]


@pytest.mark.parametrize("resumable", [False, pytest.param(True, marks=pytest.mark.full)])
def test_what_nobody_could_go_on_with_is_removed(tmp_path: Path, resumable: bool) -> None:
    code = program(
        "from tasks.run.stage import StageSpec, run_stage",
        "def build(out):",
        "    (out / 'half').touch()",
        "    ready()",
        "    time.sleep(600)",
        f"run_stage(notes, StageSpec('tiny', 1, {{}}, {{}}, resumable={resumable}), build)",
    )
    with running(code, tmp_path) as (run, _, _):
        assert stop(run, signal.SIGTERM)[0] == 143
    assert len(list(tmp_path.glob("tiny/*.partial/whole/half"))) == resumable
    assert len(list(tmp_path.rglob("half"))) == resumable


def test_stages_in_threads_hand_nothing_on_once_the_run_is_stopped(tmp_path: Path) -> None:
    code = program(
        "from tasks.run.pipeline import side_by_side",
        "from tasks.run.stage import StageSpec, run_stage",
        "workers = []",
        "both = threading.Barrier(2, lambda: workers.append(ready()))",
        "def build(status):",
        "    both.wait()",
        "    workers[0].wait()  # a stop kills it first",
        "    return {} if status == 'whole' else {'lost': 1 / 0}",
        "def part(status):",
        "    try:",
        "        run_stage(notes, StageSpec(status, 1, {}, {}), lambda _: build(status))",
        "    finally:",
        "        (notes / f'{status} went on').touch()",
        "with on_stop(lambda: time.sleep(0.5)):",
        "    side_by_side([lambda: part('whole'), lambda: part('failed')], 2)",
    )
    with running(code, tmp_path) as (run, _, _):
        assert stop(run, signal.SIGTERM) == (
            143,
            "stopped; the same command continues at step 7\n",
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["failed", "whole"]
    assert list(tmp_path.glob("*/*/manifest.json")) == []


def test_threads_start_no_cluster_and_keep_no_record_once_the_run_is_stopped(
    tmp_path: Path,
) -> None:
    code = program(
        "from tasks.cluster.lease import ClusterLease",
        "from tasks.tracking.tracker import Tracker",
        "from umim_core.config.recipe import ClusterConfig",
        "tracker = Tracker(f'sqlite:///{notes}/mlflow.db', notes)",
        "workers = []",
        "both = threading.Barrier(2, lambda: workers.append(ready()))",
        "def goes_on(call):",
        "    both.wait()",
        "    workers[0].wait()  # a stop kills it first",
        "    call()",
        "def look():",
        "    time.sleep(0.5)",
        "    (notes / f'Ray {\"ray\" in sys.modules}').touch()",
        "lease = ClusterLease(ClusterConfig(cpus=1))",
        "with on_stop(look):  # before a thread says ready",
        "    for call in lease.ensure, lambda: tracker.points('0' * 64, []):",
        "        threading.Thread(target=goes_on, args=[call], daemon=True).start()",
        "    time.sleep(600)",
    )
    with running(code, tmp_path) as (run, _, _):
        assert stop(run, signal.SIGTERM)[0] == 143
    left = {path.name for path in tmp_path.iterdir()} - {"tracking-spool"}  # the owner's name
    assert left == {"Ray False"}


def test_the_end_of_a_forked_child_is_not_that_of_the_run(tmp_path: Path) -> None:
    code = program(
        "child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,))",
        "child.start()",
        "child.terminate()",
        "child.join()",
        "(notes / str(child.exitcode)).touch()",
        "ready()",
        BUSY["in Python"],
    )
    with running(code, tmp_path) as (run, _, _):
        assert stop(run, signal.SIGTERM)[0] == 143
    assert [path.name for path in tmp_path.iterdir()] == ["-15"]
