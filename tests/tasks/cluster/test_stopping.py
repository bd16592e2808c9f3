"""One way to stop: whatever a process is busy with, it ends in seconds with one line.

Every run is a process of its own that says ``ready`` when it may be stopped. What Ray's processes
and Prefect's server do then: ``test_ray_cluster.py``, ``flows/test_stopped_runs.py``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import ROOT

SECONDS = 20.0  # on a machine that is busy with other tests
HEAD = """
import hashlib, multiprocessing, pathlib, sys, threading, time
from tasks.cluster.stopping import on_stop, stoppable
notes = pathlib.Path(sys.argv[1])
def ready(): print("ready", flush=True)
"""
HEARD = """with on_stop((notes / "told").touch), on_stop(threading.Event().wait):
        ready()
        time.sleep(600)"""
LOCKED = """lock = threading.Lock()
    def tell():
        with lock: (notes / "told").touch()
    with on_stop(tell):
        with lock:
            ready()
            time.sleep(1)
        time.sleep(600)"""
FORKED = """child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    child.terminate()
    child.join()
    (notes / str(child.exitcode)).touch()
    ready()
    time.sleep(600)"""
ON_RAY = """from tasks.cluster.ray_cluster import ray_cluster
    with ray_cluster(1):
        ready()
        time.sleep(600)"""
LINE = "stopped; the same command continues\n"
IN_C = "hashlib.pbkdf2_hmac('sha1', b'', b'', 10**9)"


TERM, INT = signal.SIGTERM, signal.SIGINT


@pytest.mark.parametrize(
    ("number", "busy", "left"),
    [
        pytest.param(INT, "ready(); time.sleep(600)", [], id="in Python"),
        pytest.param(TERM, f"ready(); {IN_C}", [], id="in C, where no handler runs"),
        pytest.param(INT, f"ready(); {IN_C}", [], id="in C, by Ctrl-C"),
        pytest.param(TERM, "ready(); threading.Event().wait()", [], id="waiting for a thread"),
        pytest.param(TERM, HEARD, ["told"], id="a call that hears of it, and one that hangs"),
        pytest.param(INT, LOCKED, ["told"], id="a call that waits for what the main thread is at"),
        pytest.param(TERM, ON_RAY, [], id="on a Ray cluster", marks=pytest.mark.full),
        pytest.param(TERM, FORKED, ["-15"], id="after the end of a child, which is not its own"),
    ],
)
def test_a_signal_ends_a_run_with_one_line(
    number: signal.Signals, busy: str, left: list[str], tmp_path: Path
) -> None:
    code = f"{HEAD}\nwith stoppable():\n    {busy}\n"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        try:
            assert run.stdout is not None and run.stdout.readline() == "ready\n"
            run.send_signal(number)
            said = run.communicate(timeout=SECONDS)[1]
            assert (run.returncode, said) == (128 + number, LINE)
            assert [path.name for path in tmp_path.iterdir()] == left
        finally:
            run.kill()
