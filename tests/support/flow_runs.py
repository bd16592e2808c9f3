"""Runs of ``python -m flows`` in processes of their own, and what they leave below a root."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from support.processes import ROOT
from tasks.run.stage import STAGE_SCHEMA, Artifact
from umim_core.store.artifacts import MANIFEST, read_manifest

_SECONDS = 900.0


def start(root: Path, *arguments: object, **environment: str) -> subprocess.Popen[bytes]:
    """Start ``flows run`` in a group of its own as a terminal does; ``<root>.log`` has its output.

    Unless it is told otherwise, MLflow and Prefect have stores beside the root.
    """
    own = {"UMIM_ROOT": str(root), "PREFECT_HOME": str(root.with_name("prefect"))}
    own["MLFLOW_TRACKING_URI"] = f"sqlite:///{root.with_name('mlflow.db')}"
    with root.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "flows", "run", *map(str, arguments)],
            cwd=ROOT,
            env=os.environ | own | environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def said(root: Path) -> str:
    return root.with_suffix(".log").read_text("utf-8", errors="replace")


def has_step(root: Path, step: int) -> bool:
    """Return whether a distillation has saved the state of a step."""
    states = root.glob(f"distill/*.partial/whole/state/step-*/{MANIFEST}")
    return any(int(path.parent.name.removeprefix("step-")) >= step for path in states)


def wait_for_step(root: Path, step: int, over: Callable[[], object] = lambda: None) -> None:
    """Wait until a distillation :func:`has_step`; fail if the run is ``over``."""
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline and over() is None:
        if has_step(root, step):
            return
        time.sleep(0.005)
    raise AssertionError(f"no state of step {step} below {root}")


def digests(root: Path, *but: str) -> dict[str, str]:
    """Digests of all that has a name, but of some stages, once every file was read."""
    whole = [path for path in root.glob("*/*") if len(path.name) == 64]
    records = (read_manifest(path, kind="stage", schema=STAGE_SCHEMA) for path in whole)
    artifacts = map(Artifact.of, whole, records)
    return {f"{one.stage}/{one.key}": one.digest for one in artifacts if one.stage not in but}
