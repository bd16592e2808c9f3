"""Processes that kill themselves at a call of some function."""

from __future__ import annotations

import importlib
import os
import signal
from typing import Any


def die_at(place: str, number: int, when: str) -> None:
    """Have this process kill itself ``before`` or ``after`` a call, from 1, of ``module.function``.

    Whoever looks the function up there from now on gets the deadly one.
    """
    module, _, name = place.rpartition(".")
    owner, calls = importlib.import_module(module), [0]
    call = getattr(owner, name)

    def dying(*args: Any, **named: Any) -> Any:
        calls[0] += 1
        if (calls[0], when) == (number, "before"):
            os.kill(os.getpid(), signal.SIGKILL)
        found = call(*args, **named)
        if calls[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, dying)
