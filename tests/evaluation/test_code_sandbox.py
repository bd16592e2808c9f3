"""Model-written programs in the sandbox: what they can compute, and what they cannot do."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from umim_core.errors import ConfigError, EvaluationError
from umim_core.evaluation.sandbox.code_sandbox import run_confined

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="seccomp numbers of x86-64"
)


def test_a_right_program_passes_with_the_standard_library() -> None:
    program = """
import collections, functools, hashlib, heapq, itertools, math, random, re, statistics, string
from typing import List
def add(numbers: List[int]) -> int:
    print("shown to nobody")
    return sum(numbers)
assert add([1, 2]) == 3 and math.isclose(random.Random(1).random(), random.Random(1).random())
assert hashlib.md5(b"x").hexdigest().startswith("9dd4") and open(__file__).read()
"""
    verdict = run_confined(program)
    assert (verdict.passed, verdict.reason) == (True, "passed")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("assert 1 + 1 == 3", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit(0)", "SystemExit"),
        ("import os; os._exit(0)", "died (0)"),
        ("import numpy", "ModuleNotFoundError"),
        ("x = bytearray(2 << 30)", "MemoryError"),
        ("def f(): f()\nf()", "RecursionError"),
        ("class Secret42(Exception): pass\nraise Secret42", "exception"),
    ],
)
def test_a_program_that_does_not_reach_its_end_fails(program: str, reason: str) -> None:
    verdict = run_confined(program)
    assert (verdict.passed, verdict.reason) == (False, reason)


@pytest.mark.parametrize(
    ("program", "wall"), [("while True: pass", 200.0), ("import time; time.sleep(200)", 0.7)]
)
def test_a_program_without_end_is_stopped(program: str, wall: float) -> None:
    start = time.monotonic()
    assert run_confined(program, seconds=1, wall_seconds=wall).reason == "timed out"
    assert time.monotonic() - start < 180


def children(process: int) -> list[int]:
    """Return the processes that a process has started and that have not ended."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, rest = status.read_text().split(" ", 1)
        except OSError:  # it has ended
            continue
        state, parent = rest.rpartition(")")[2].split()[:2]
        if int(parent) == process and state != "Z":
            found.append(int(number))
    return found


def runs_program(process: int) -> bool:
    """Return whether a process has a filter and lives."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
    return "Seccomp:\t2" in status and "State:\tZ" not in status


def await_true(condition: Callable[[], bool]) -> bool:
    """Return whether a condition comes true within two minutes."""
    end = time.monotonic() + 120
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGALRM, signal.SIGKILL])
def test_a_program_ends_with_the_call_that_runs_it(by: signal.Signals) -> None:
    caller = (
        "import signal\n"
        "signal.signal(signal.SIGALRM, lambda *_: 1 / 0)\n"
        "from umim_core.evaluation.sandbox.code_sandbox import run_confined\n"
        "run_confined('import time; time.sleep(600)', wall_seconds=600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", caller], stderr=subprocess.DEVNULL) as process:
        assert await_true(lambda: any(map(runs_program, children(process.pid))))
        (program,) = children(process.pid)
        try:
            process.send_signal(by)
            process.wait(120)
            assert await_true(lambda: not runs_program(program))
        finally:
            process.kill()
            if runs_program(program):
                os.kill(program, signal.SIGKILL)


ATTEMPTS = {
    "Socket": "socket.socket()",
    "LocalSocket": "socket.socket(socket.AF_UNIX)",
    "Connection": "socket.create_connection(('127.0.0.1', 9))",
    "Fork": "os.fork()",
    "Process": "subprocess.run(['/bin/true'])",
    "Exec": "os.execv('/bin/true', ['true'])",
    "Overwrite": "open(victim, 'w')",
    "Append": "open(victim, 'a')",
    "Update": "open(victim, 'r+')",
    "Create": "open(folder + '/new', 'x')",
    "CreateHere": "open('here', 'w')",
    "Remove": "os.remove(victim)",
    "Rename": "os.rename(victim, victim + '2')",
    "MakeFolder": "os.mkdir(folder + '/sub')",
    "RemoveFolder": "os.rmdir(folder)",
    "ChangeMode": "os.chmod(victim, 0)",
    "Truncate": "os.truncate(victim, 0)",
    "Link": "os.symlink(victim, folder + '/link')",
    "ChangeTimes": "os.utime(victim)",
    "Signal": "os.kill(parent, 9)",
    "SignalByFcntl": "fcntl.fcntl(os.open(victim, 0), fcntl.F_SETOWN, parent)",
    "NumberOfSignal": "fcntl.fcntl(os.open(victim, 0), 10, 9)",
    "SignalOfInput": "fcntl.fcntl(os.open(victim, 0), fcntl.F_SETFL, os.O_ASYNC)",
    "Lock": "fcntl.lockf(os.open(victim, 0), fcntl.LOCK_SH)",
    "Lease": "fcntl.fcntl(os.open(victim, 0), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "RaiseLimit": "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
    "Namespace": "kernel.unshare(0x10000000) and refuse()",
}


def allowed_attempt(attempts: dict[str, str], folder: Path) -> str | None:
    """Return the first attempt that the kernel lets through."""
    lines = [
        "import ctypes, fcntl, os, resource, socket, subprocess",
        f"folder, victim, parent = {str(folder)!r}, {str(folder / 'victim')!r}, {os.getpid()}",
        "kernel = ctypes.CDLL(None)",
        "def refuse(): raise PermissionError",
        "refused = (PermissionError, ValueError)  # ValueError: setrlimit's word for it",
    ]
    for place, attempt in enumerate(attempts.values()):
        lines += [f"try: {attempt}", "except refused: pass", f"else: os._exit({place})"]
    reason = run_confined("\n".join(lines)).reason
    ends = {f"died ({place})": name for place, name in enumerate(attempts)}
    return None if reason == "passed" else ends.get(reason, reason)


def test_the_kernel_refuses_what_leaves_the_process(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("whole")
    assert allowed_attempt(ATTEMPTS, tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]
    assert victim.read_text() == "whole"


def test_no_signal_reaches_others_by_way_of_a_pipe() -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        program = f"""
import fcntl, os
for fd in range(3, 16):
    try:
        reading = os.open(f"/proc/self/fd/{{fd}}", os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(reading, fcntl.F_SETOWN, {other.pid})
        fcntl.fcntl(reading, 10, 9)  # F_SETSIG, SIGKILL
        fcntl.fcntl(reading, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        os.write(fd, b"7")
    except OSError:
        continue
"""
        run_confined(program)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.2)
        other.kill()


def test_environment_and_folder_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "1")
    program = "import os\nassert 'SECRET_TOKEN' not in os.environ and os.listdir('.') == []"
    assert run_confined(program).passed


def test_bounds_and_machines_without_confinement_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match=r"at least 1 CPU second.*got 0 s, 60\.0 s"):
        run_confined("pass", seconds=0)
    with pytest.raises(ConfigError, match=r"wall-clock time; got 10 s, 0\.0 s"):
        run_confined("pass", wall_seconds=0.0)
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    with pytest.raises(EvaluationError, match="Linux on x86-64 only"):
        run_confined("pass")
