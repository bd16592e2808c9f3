"""Limits of tests on a busy machine: a process that waits for a processor is not late."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from support.busy_machine import processor_waits, within

# Two processes on one processor, each of which needs it for half a second.
HALF_A_SECOND = """
import os, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print("ready", flush=True)
input()
while time.process_time() < 0.5: pass
input()
"""


def test_a_process_that_waits_for_a_processor_is_seen_to_wait() -> None:
    command = [sys.executable, "-S", "-c", HALF_A_SECOND]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen(command, **pipes) as one, subprocess.Popen(command, **pipes) as other:
        both = (one, other)
        try:
            for process in both:
                assert process.stdout is not None and process.stdout.readline() == "ready\n"
            for process in both:
                assert process.stdin is not None
                process.stdin.write("\n")
            pids = [process.pid for process in both]
            assert within(60, lambda: processor_waits(*pids) > 0.3)
        finally:
            for process in both:
                process.kill()


def test_what_does_not_end_is_late() -> None:
    began = time.monotonic()
    assert not within(0.1, lambda: False, os.getpid())
    assert time.monotonic() - began > 0.1
