"""The console entry ``umim``, run in this process."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from functools import cache
from string import ascii_lowercase
from typing import Any, NamedTuple

import pytest
from typer.main import get_command

from umim_core.cli.app import main

LETTERS = ["<eos>", "7", *ascii_lowercase, *"ABCD"]  # words of the model ``letters``
# typer makes all commands anew at every call, in 47 ms.
pytest.MonkeyPatch().setattr("typer.main.get_command", cache(get_command))


class Result(NamedTuple):
    """Exit status, stdout and stderr."""

    code: int
    out: str
    err: str


Umim = Callable[..., Result]


def document(result: Result) -> dict[str, Any]:
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert isinstance(found, dict)
    return found


def console(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Umim:
    """Return a function that runs ``umim`` with arguments, and the bytes of stdin if it is open."""

    def run(*arguments: object, stdin: bytes | None = b"") -> Result:
        monkeypatch.setattr(sys, "argv", ["umim", *map(str, arguments)])
        stream = None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin), "utf-8")
        monkeypatch.setattr(sys, "stdin", stream)
        with pytest.raises(SystemExit) as caught:
            main()
        return Result(int(caught.value.code or 0), *capsys.readouterr())

    return run


def run_main(*arguments: object) -> None:
    """Run ``umim`` with arguments to a good end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["umim", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code
