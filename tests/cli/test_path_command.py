"""``umim path --tasks``: the folder where lm-eval's command finds the tasks of the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.command_line import console


def test_path_prints_the_folder_of_tasks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    umim = console(monkeypatch, capsys)
    (task,) = Path(umim("path", "--tasks").out.strip()).glob("umim_docstrings.yaml")
    assert json.loads(umim("path", "--tasks", "--json").out) == {"tasks": str(task.parent)}
