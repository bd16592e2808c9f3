"""Children that end with their parent, however it ends: on Linux alone."""

from __future__ import annotations

import ctypes
import signal
import sys
from typing import Final

_SET_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG
_prctl: Final = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # others have none


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends; Linux alone can.

    As ``preexec_fn`` of a process whose program is not ours, or its first call.
    """
    if _prctl is not None:
        _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
