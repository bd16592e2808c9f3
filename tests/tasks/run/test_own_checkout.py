"""A worker that stands in one checkout and would run the flows of another is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.cluster.ray_cluster import CHECKOUT

CHILD = "from tasks.run.prefect_runs import require_own_checkout; require_own_checkout()"
WORKER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


def started_in(folder: Path) -> str:
    """Return what a process complains of whose parent stands in a folder."""
    done = subprocess.run(
        [sys.executable, "-c", WORKER],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
    )
    return done.stderr


@pytest.mark.parametrize("inside", [".", pytest.param("docs", marks=pytest.mark.full)])
def test_a_worker_in_another_checkout_is_refused(tmp_path: Path, inside: str) -> None:
    (tmp_path / "flows").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "flows" / "__init__.py").touch()
    (tmp_path / "prefect.yaml").touch()
    complaint = started_in(tmp_path / inside)
    assert "ConfigError: a Prefect worker must run the flows of the checkout" in complaint
    assert f"{CHECKOUT}, by a worker in {tmp_path}" in complaint


def test_a_worker_in_its_own_checkout_may_run() -> None:
    assert started_in(CHECKOUT) == ""


@pytest.mark.full
def test_a_worker_in_no_checkout_may_run(tmp_path: Path) -> None:
    assert started_in(tmp_path) == ""
