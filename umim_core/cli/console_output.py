"""Printing of the ``umim`` commands, and the flags that every command line has."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Final

import typer

from umim_core.addresses import scrubbed
from umim_core.errors import ArtifactError, UmimError
from umim_core.store.disk import unwritable

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE, errno.EBADF)
_OUT_OF_REACH: Final = (
    errno.ENAMETOOLONG, errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.ELOOP, errno.EISDIR,
)  # fmt: skip


def _print_version(is_given: bool) -> None:
    if is_given:
        from umim_core import __version__

        typer.echo(f"umim {__version__}")
        raise typer.Exit


JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
VersionFlag = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
]


def log_lines(name: str) -> logging.Handler:
    """Show what a logger says on stderr, each line with its time; return the handler."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%H:%M:%S"))
    shown = logging.getLogger(name)
    shown.setLevel(logging.INFO)
    shown.handlers = [handler]
    shown.propagate = False
    return handler


def emit(document: dict[str, object], lines: list[str], as_json: bool) -> None:
    text = json.dumps(document, allow_nan=False) if as_json else "\n".join(lines)
    write(text)


def write(text: str, *, newline: bool = True) -> None:
    """Print a text at once; what stdout's encoding lacks ``telling`` escapes."""
    # click would write UTF-8 into an ASCII stdout.
    sys.stdout.write(f"{text}\n" if newline else text)
    sys.stdout.flush()


@contextmanager
def telling(program: str) -> Iterator[None]:
    """End a program with status 1 and a line on stderr, and notes, where a rule is broken.

    What stdout's encoding lacks is escaped.
    """
    if sys.stdout is None:  # closed: writers would be silent, and the next file become stdout
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except (OSError, RuntimeError, UmimError) as error:
        broken = error if isinstance(error, UmimError) else _broken(error)
        notes = getattr(broken, "__notes__", [])
        typer.echo(scrubbed("\n".join([f"{program}: error: {broken}", *notes])), err=True)
        raise SystemExit(1) from None


def _broken(error: OSError | RuntimeError) -> UmimError:
    """Return what the system refuses of stdout, or of a file by name, as an error; raise others."""
    rule, remedy = "a file must be within reach", "Check its path and who may read it."
    if isinstance(error, RuntimeError):
        if not str(error).startswith("Symlink loop"):  # pathlib's word for ELOOP
            raise error
        return ArtifactError(rule, str(error), remedy)
    if error.filename is None and error.errno in _FULL:
        # What could not be written would be tried again, and complained about, at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ArtifactError("stdout must take the output", error.strerror)
    if error.filename is not None and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return unwritable(Path(str(error.filename)), 0, error)
    if error.filename is not None and error.errno in _OUT_OF_REACH:
        return ArtifactError(rule, f"{error.filename}: {error.strerror}", remedy)
    raise error
