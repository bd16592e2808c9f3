"""Errors of lm-eval's own command: one line instead of a traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from umim_core.errors import UmimError

_COMMANDS: Final = ("lm_eval", "lm-eval")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End lm-eval's command with one line; every other caller gets the typed error as it is.

    lm-eval builds models and tasks deep inside its command and catches nothing on the way out.

    Raises:
        SystemExit: Instead of an ``UmimError`` when the process is lm-eval's command.
    """
    try:
        yield
    except UmimError as error:
        if not _is_lm_eval_command():
            raise
        raise SystemExit(f"umim: error: {error}") from error


def _is_lm_eval_command() -> bool:
    """Return whether this process is ``lm_eval``, ``lm-eval`` or ``python -m lm_eval``."""
    program = Path(sys.argv[0] if sys.argv else "")
    return program.stem in _COMMANDS or program.parts[-2:] == ("lm_eval", "__main__.py")
