"""Children that end with their parent, however it ends."""

from __future__ import annotations

import ctypes
import signal
from typing import Final

_SET_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG
_prctl: Final = getattr(ctypes.CDLL(None), "prctl", None)  # Linux alone has it


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends.

    As ``preexec_fn`` of a process whose program is not ours, or its first call.
    """
    if _prctl is not None:
        _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
