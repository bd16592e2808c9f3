"""Console of lm-eval: errors in one line instead of a traceback, bars only where wanted."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from umim_core.errors import ConfigError, UmimError, did_you_mean

P = ParamSpec("P")
R = TypeVar("R")
_COMMANDS: Final = ("lm_eval", "lm-eval")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End lm-eval's command with one line; every other caller gets the typed error as it is.

    lm-eval builds models and tasks deep inside its command and catches nothing on the way out.
    """
    try:
        yield
    except UmimError as error:
        program = Path(sys.argv[0] if sys.argv else "")
        if program.stem not in _COMMANDS and program.parts[-2:] != ("lm_eval", "__main__.py"):
            raise
        raise SystemExit(f"umim: error: {error}") from error


def bars_are_hidden() -> bool:
    """Return whether ``TQDM_DISABLE`` is set; tqdm ignores it where lm-eval passes a flag."""
    return os.environ.get("TQDM_DISABLE", "0") not in ("", "0")


def known_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Refuse names from ``--model_args`` that a function does not have."""
    known = list(inspect.signature(function).parameters)

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                names = ", ".join(known[1:])
                raise ConfigError(
                    f"an argument of the model must be one of {names}",
                    name,
                    did_you_mean(name, known) or "Leave it out.",
                )
        return function(*args, **kwargs)

    return checked
