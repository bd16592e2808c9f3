"""The checkout and its models; commands in processes of their own, and what they print."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from umim_core.model_sources.model_cache import model_fault
from umim_core.model_sources.packaged_model import PACKAGED

ROOT = Path(__file__).resolve().parents[2]


def need_model() -> None:
    """Skip the test where the packaged model of the default checkpoint is not on this machine."""
    name = "smollm2-135m-instruct"
    if fault := model_fault(PACKAGED[name]):
        pytest.skip(f"{fault}; umim fetch {name}")


def run_command(
    *command: object,
    cwd: Path = ROOT,
    seconds: float = 600,
    stdin: str | None = None,
    without: tuple[str, ...] = (),
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, without the variables whose names begin as ``without`` says."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(without)}
    return subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=own | environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def output_of(*command: object, **options: Any) -> str:
    """Run a command to a good end, with the options of ``run_command``; return its output."""
    done = run_command(*command, **options)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout
