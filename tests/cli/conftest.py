"""The command ``umim`` in this process, with an artifact root of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.command_line import Umim, console


@pytest.fixture
def umim(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Umim:
    monkeypatch.setenv("UMIM_ROOT", str(tmp_path / "root"))
    return console(monkeypatch, capsys)
