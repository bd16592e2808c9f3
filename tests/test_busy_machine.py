"""Limits of tests on a busy machine: a process that waits for a processor is not late."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.busy_machine import processor_waits, within

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this system counts no waits of threads"
)
# Four threads of one process on one processor, beside the threads of another one.
BUSY = """
import os, threading
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
def spin():
    while True: os.urandom(1 << 22)  # without the interpreter's lock
for _ in range(4): threading.Thread(target=spin, daemon=True).start()
print("ready", flush=True)
input()
"""


def test_threads_that_wait_for_a_processor_are_seen_to_wait_and_excuse_no_endless_process() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-S", "-c", BUSY], **pipes) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            assert within(60, lambda: max(processor_waits(process.pid).values()) > 0.3)
            began = time.monotonic()
            assert not within(0.2, lambda: False, process.pid)
            assert 0.2 < time.monotonic() - began < 60
        finally:
            process.kill()
