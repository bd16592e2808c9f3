"""Children that end with their parent, however it ends: on Linux alone."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

_SET_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG
_prctl: Final = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # others have none


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; Linux alone can.

    As ``preexec_fn``, ``partial(die_with_parent, os.getpid())``: a parent that has ended before
    this call has the same effect.
    """
    if _prctl is not None:
        _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
