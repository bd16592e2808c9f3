"""Execution of model-written Python programs, confined by the kernel.

| threat | prevented by |
|---|---|
| network | seccomp: no socket can be made |
| processes, threads, fork bombs | seccomp: none can be started |
| writing, creating, removing, renaming files | seccomp: nothing is opened to write |
| reading files of the user, devices, shared memory, /proc | Landlock: the library alone is opened |
| memory, descriptors of other processes, the caller's too | Landlock, seccomp |
| signals to others, mounts, changed limits, kernel interfaces | seccomp: calls not listed |
| signals that the kernel sends for one, locks on files | seccomp: commands of `fcntl` not listed |
| endless loops, sleeping | a limit of CPU time; killed after one of wall-clock time |
| outliving an interrupted or killed caller | killed; the kernel ends it with the calling thread |
| memory | a limit of address space |
| floods of output | standard output and error are thrown away; the report has a bound |
| secrets in environments | the program's is empty, those of others are in /proc |

Not prevented:
- Reading the interpreter's library folders and the system's, installed packages among them; asking
  whether a path exists, of which size and age it is. Nothing can be sent anywhere or kept; what
  leaves the process is the verdict, of whose reason the program chooses the name of a built-in
  exception or an exit code.
- Reading and writing its own two pipes anew, by `/proc/self/fd`: its own input and report.
- Facts of the machine (load, memory, processors, clocks), and what a busy neighbour's timing tells.
- A false claim of success. The guard runs in the program's interpreter, so that three lines, a walk
  over `sys._getframe().f_back`, find the nonce. The sandbox protects the machine; it does not prove
  that a program made to pass is right.
- Errors in the kernel's own filter.

Linux 5.13 or later on x86-64 only, with Landlock; elsewhere nothing is run. In containers that
forbid seccomp filters or Landlock nothing is run either.

Source: HumanEval (Chen et al., 2021) asks for a sandbox and ships none; seccomp(2), landlock(7).
"""

from __future__ import annotations

import builtins
import os
import platform
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from umim_core.errors import EvaluationError, require
from umim_core.store.scratch import scratch_folder

_GUARD: Final = Path(__file__).with_name("sandbox_guard.py")
_REPORT_BYTES: Final = 512
_MEGABYTES: Final = 512  # of address space; the interpreter itself takes about 30
_PASSED: Final = "passed"
_EXCEPTIONS: Final = frozenset(
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException)
)


@dataclass(frozen=True)
class Verdict:
    passed: bool
    reason: str


def run_confined(program: str, *, seconds: int = 10, wall_seconds: float = 60.0) -> Verdict:
    """Run a Python program of the standard library in a confined process.

    CPU seconds include the interpreter's start; wall-clock seconds are many, as a busy machine must
    not fail right programs.
    """
    machine = sys.platform, platform.machine()
    rule = "model-written code is run on Linux on x86-64 only, where the kernel can confine it"
    fits = machine == ("linux", "x86_64")
    require(fits, EvaluationError, rule, " on ".join(machine), "Evaluate elsewhere.")
    nonce = secrets.token_hex(16)
    with scratch_folder(Path(tempfile.gettempdir()), "umim-sandbox") as folder:
        place, empty = folder / "program.py", folder / "empty"
        place.write_text(program, encoding="utf-8", errors="replace")
        empty.mkdir()
        code, report = _run(place, empty, nonce, seconds=seconds, wall_seconds=wall_seconds)
    state, _, detail = report.partition(" ")
    rule = "limits, Landlock and a seccomp filter must be set before a model's code is run"
    remedy = "Evaluate on Linux 5.13 or later, where containers allow Landlock and seccomp."
    require(state != "unconfined", EvaluationError, rule, detail, remedy)
    if code is None:
        return Verdict(False, "timed out")
    if code == 0 and state == "confined" and detail == nonce:
        return Verdict(True, _PASSED)
    if code != 0 or not detail.isidentifier():
        return Verdict(False, f"died ({code})")
    return Verdict(False, detail if detail in _EXCEPTIONS else "exception")


def _run(
    program: Path, folder: Path, nonce: str, *, seconds: int, wall_seconds: float
) -> tuple[int | None, str]:
    """Return the exit code, None if the time was up, and the guard's report."""
    reading, writing = os.pipe()
    numbers = (writing, os.getpid(), seconds, _MEGABYTES)
    arguments = [str(program), *map(str, numbers)]
    with open(reading, "rb") as report:
        try:
            process = subprocess.Popen(  # noqa: S603  the guard confines what it runs
                [sys.executable, "-I", "-S", "-B", str(_GUARD), *arguments],
                cwd=folder,
                env={},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(writing,),
                start_new_session=True,
            )
        finally:
            os.close(writing)
        with process:
            try:
                process.communicate(nonce.encode() + b"\n", timeout=wall_seconds)
                code: int | None = process.returncode
                if code == -signal.SIGXCPU:
                    code = None
            except subprocess.TimeoutExpired:
                code = None
            finally:  # also after Ctrl-C or an alarm, else leaving `with` waits for the program
                process.kill()
        # No other process holds the writing end: what is in the pipe is all there is.
        return code, report.read(_REPORT_BYTES).decode(errors="replace")
