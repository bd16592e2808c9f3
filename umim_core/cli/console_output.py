"""Printing of the ``umim`` commands, and the flags that every command line has."""

from __future__ import annotations

import json
import logging
import sys
from typing import Annotated

import typer


def _print_version(wanted: bool) -> None:
    if wanted:
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
    """Print a result. No terminal encoding refuses it: JSON is ASCII, text is escaped as needed."""
    text = json.dumps(document, allow_nan=False) if as_json else "\n".join(lines)
    write(text)


def write(text: str, *, newline: bool = True) -> None:
    """Print a text at once, what the terminal's encoding lacks as escapes."""
    encoding = sys.stdout.encoding if sys.stdout is not None else "utf-8"
    typer.echo(text.encode(encoding, "backslashreplace").decode(encoding), nl=newline)
