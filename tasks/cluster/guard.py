"""Guard process of a pipeline: passes signals on to it and cleans up when it has ended.

    python -P tasks/cluster/guard.py PID TOKEN FOLDER_PREFIX...

Standard input is a pipe from the pipeline. The kernel writes the number of every signal into it
(``signal.set_wakeup_fd``), whatever the pipeline is busy with; TERM and Ctrl-C are sent on to
standard output, where a thread of the pipeline listens. A pipeline that has not ended in time is
killed. When the pipe closes, or the pipeline is gone without that (SIGKILL), every process that
carries the token in its environment is killed with its children, and the folders that begin with
the prefixes are removed.

It imports the standard library and psutil only, so it is there in a tenth of a second.
"""

from __future__ import annotations

import contextlib
import glob
import os
import select
import shutil
import signal
import sys
import time

import psutil

VARIABLE = "UMIM_GUARD"  # the token, in the environment of all that a pipeline starts
STOP_SECONDS = 4.0  # from a signal to the kill of a pipeline that does not end
_LOOK_SECONDS = 0.5  # between two looks whether the pipeline lives
_SIGNALS = {int(signal.SIGTERM), int(signal.SIGINT)}


def main() -> None:
    """Watch a pipeline to its end, then clear up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when the pipeline does
    pid, token, *prefixes = sys.argv[1:]
    _watch(int(pid))
    _clear(int(pid), token, prefixes)


def _watch(pid: int) -> None:
    """Return when the pipe is closed or the pipeline is gone."""
    deadline: float | None = None
    while os.getppid() == pid:
        if deadline is not None and time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):  # nobody may be reading any more
                os.write(2, b"stopped; the same command continues\n")
            return
        ready, _, _ = select.select([0], [], [], _LOOK_SECONDS)
        if not ready:
            continue
        numbers = os.read(0, 64)
        if not numbers:
            return
        if deadline is None and (signals := [n for n in numbers if n in _SIGNALS]):
            deadline = time.monotonic() + STOP_SECONDS
            os.write(1, bytes(signals[:1]))


def _clear(pid: int, token: str, prefixes: list[str]) -> None:
    marked = [process for process in psutil.process_iter() if _carries(process, token)]
    # A title may overwrite a process's environment (Ray is asked not to), so children count too.
    family = {child for process in marked for child in _children(process)} | set(marked)
    kill([process for process in family if process.pid not in (pid, os.getpid())])
    for prefix in prefixes:
        for folder in glob.glob(f"{glob.escape(prefix)}*"):
            shutil.rmtree(folder, ignore_errors=True)


def _carries(process: psutil.Process, token: str) -> bool:
    try:
        return process.environ().get(VARIABLE) == token
    except (psutil.Error, OSError):  # of another user, or gone
        return False


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def kill(processes: list[psutil.Process]) -> None:
    """Kill processes and wait a second for their end."""
    for process in processes:
        try:
            process.kill()
        except psutil.Error:  # gone already
            continue
    psutil.wait_procs(processes, timeout=1.0)


if __name__ == "__main__":
    main()
