"""The console entry ``umim``, run in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from umim_core.cli.app import main


class Result(NamedTuple):
    """Exit status, stdout and stderr."""

    code: int
    out: str
    err: str


Umim = Callable[..., Result]


def console(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Umim:
    """Return a function that runs ``umim`` with arguments."""

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["umim", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        return Result(int(caught.value.code or 0), *capsys.readouterr())

    return run
