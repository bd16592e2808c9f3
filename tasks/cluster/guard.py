"""Guard of a Ray cluster: once its driver has ended, however that was, it ends what is left.

    python -P tasks/cluster/guard.py FOLDER DRIVER

Standard input is a pipe from the driver, which writes a byte when its block ends, for a fork may
keep the pipe open; the driver's process id is looked at, too. The kernel kills Ray's servers with
the driver, and Ray itself its workers within two seconds, but its agents on the machine go on for
minutes. All have the cluster's folder in their environment; they are killed and the folder is
removed.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys

import psutil

VARIABLE = "UMIM_RENDEZVOUS"  # the folder, in the environment of all that Ray starts
_LOOK_SECONDS = 0.5


def main() -> None:
    folder, driver = sys.argv[1], int(sys.argv[2])
    while os.getppid() == driver and not select.select([sys.stdin], [], [], _LOOK_SECONDS)[0]:
        pass
    while left := _killed(folder):  # again: they start others
        psutil.wait_procs(left, timeout=1.0)
    shutil.rmtree(folder, ignore_errors=True)


def _killed(folder: str) -> list[psutil.Process]:
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # of another user, or gone
            if process.environ().get(VARIABLE) == folder:
                process.kill()
                left.append(process)
    return left


if __name__ == "__main__":
    main()
