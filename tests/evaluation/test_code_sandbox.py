"""Model-written programs in the sandbox: what they can compute, and what they cannot do."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from umim_core.errors import EvaluationError
from umim_core.evaluation import code_sandbox
from umim_core.evaluation.code_sandbox import run_confined

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="seccomp numbers of x86-64"
)


def test_a_right_program_passes_with_the_standard_library_and_nothing_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "1")
    program = """
import collections, functools, hashlib, heapq, itertools, math, os, random, re, statistics, string
from typing import List
def add(numbers: List[int]) -> int:
    print("shown to nobody")
    return sum(numbers)
assert add([1, 2]) == 3 and math.isclose(random.Random(1).random(), random.Random(1).random())
assert hashlib.md5(b"x").hexdigest().startswith("9dd4") and open(__file__).read()
assert "SECRET_TOKEN" not in os.environ and os.listdir(".") == []
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
    found = psutil.Process(process).children()
    return [child.pid for child in found if child.status() != psutil.STATUS_ZOMBIE]


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
        "from umim_core.evaluation.code_sandbox import run_confined\n"
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
READS = {
    **{
        f"{place.title().replace('/', '')}Of{owner.title()}": f"read('/proc/%s/{place}' % {owner})"
        for owner in ("parent", "first", "beside")
        for place in ("mem", "environ", "maps", "cmdline", "fd", "fd/1", "cwd/.", "root/etc/passwd")
    },
    "PipeOfParent": "read(f'/proc/{parent}/fd/{pipe}')",
    "PipeOfThread": "read(f'/proc/{parent}/task/{parent}/fd/{pipe}')",
    "LinkOfParent": "os.readlink(f'/proc/{parent}/fd/{pipe}')",
    "PlaceOfParent": "os.readlink(f'/proc/{parent}/cwd')",
    "OwnMemory": "read('/proc/self/mem')",
    "ByOwnThread": "read(f'/proc/thread-self/../../../{parent}/fd/{pipe}')",
    "ByOwnRoot": "read(f'/proc/self/root/proc/{parent}/fd/{pipe}')",
    "ByOwnFolder": "read(f'/proc/self/cwd/../../../../../proc/{parent}/environ')",
    "FileOfUser": "read(victim)",
    "FolderOfUser": "os.listdir(folder)",
    "NamedPipe": "os.open(folder + '/pipe', os.O_NONBLOCK)",
    "SharedMemory": "read(shared)",
    "AllShared": "os.listdir('/dev/shm')",
    "Terminal": "os.open('/dev/ptmx', 0)",
    "Terminals": "os.listdir('/dev/pts')",
    "Device": "read('/dev/zero')",
    "System": "read('/sys/kernel/notes')",
    "Passwords": "read('/etc/passwd')",
    "MemoryOfParent": "call(310, parent, 0, 0, 0, 0, 0)",  # process_vm_readv
    "HandleOfParent": "call(434, parent, 0)",  # pidfd_open
    "DescriptorOfParent": "call(438, 0, pipe, 0)",  # pidfd_getfd
    "CompareWithParent": "call(312, parent, os.getpid(), 0, pipe, 0)",  # kcmp
    "Trace": "call(101, 16, parent, 0, 0)",
    "LimitsOfParent": "resource.prlimit(parent, resource.RLIMIT_NOFILE)",
    "AbstractSocket": "socket.socket(socket.AF_UNIX).connect(chr(0) + 'name')",
    "HandleOfFile": "call(304, -100, 0, 0)",  # open_by_handle_at
    "OtherOpen": "call(437, -100, victim.encode(), 0, 0)",  # openat2
    "OpenTree": "call(428, -100, b'/', 0)",
    "Inherited": "any(map(readable, range(1, 64))) or refuse()",
}


def allowed_attempt(attempts: dict[str, str], folder: Path, **names: object) -> str | None:
    """Return the first attempt that the kernel lets through; ``names`` are those that they use."""
    lines = [
        *(f"{name} = {value!r}" for name, value in names.items()),
        "def read(path): return os.read(os.open(path, os.O_NONBLOCK), 1)",
        "def readable(number):",
        "    try: return os.read(number, 1)",
        "    except OSError: return False",
        "def call(*numbers): return kernel.syscall(*numbers) < 0 and refuse()",
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


def test_nothing_of_the_user_or_of_other_processes_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("private")
    os.mkfifo(tmp_path / "pipe")
    reading, writing = os.pipe()
    os.write(writing, b"message")
    os.set_inheritable(reading, True)
    beside = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with beside, tempfile.NamedTemporaryFile(dir="/dev/shm") as shared:
        names = {"pipe": reading, "beside": beside.pid, "first": 1, "shared": shared.name}
        assert allowed_attempt(READS, tmp_path, **names) is None
        beside.kill()
    assert os.read(reading, 99) == b"message"
    os.close(reading)
    os.close(writing)


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


def test_machines_without_confinement_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    guard = Path(code_sandbox.__file__).with_name("sandbox_guard.py").read_text()
    for needed, missing, word in (
        ("444, 445, 446", "4440, 445, 446", "Landlock"),
        ("38, 22, 2", "38, 22, 9", "seccomp"),
    ):
        assert needed in guard
        (tmp_path / "guard.py").write_text(guard.replace(needed, missing))
        monkeypatch.setattr(code_sandbox, "_GUARD", tmp_path / "guard.py")
        with pytest.raises(EvaluationError, match=f"must be set before .*; got .*{word}"):
            run_confined("pass")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    with pytest.raises(EvaluationError, match="Linux on x86-64 only"):
        run_confined("pass")
