"""A job submitted to a Ray cluster brings its code along, and what it builds outlives the cluster.

Needs Ray's dashboard: ``pip install --no-deps --require-hashes -r requirements/server.txt``.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.processes import run_command
from support.ray_nodes import node
from support.servers import free_port
from support.small_recipe import write_recipe
from support.source_tree import ROOT
from umim_core.store.artifacts import directory_digest, read_json

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        importlib.util.find_spec("aiohttp_cors") is None,
        reason="no Ray dashboard: requirements/server.txt is not installed",
    ),
]


class Cluster:
    """A Ray node that takes jobs, started in an empty folder: it has no checkout of its own."""

    def __init__(self, base: Path) -> None:
        self.base, self._dashboard, self._stack = base, free_port(), ExitStack()
        self.nowhere = base / "nowhere"
        self.nowhere.mkdir()

    def __enter__(self) -> Cluster:
        options = ["--head", "--node-ip-address=127.0.0.1", f"--port={free_port()}", "--num-cpus=2"]
        options += ["--include-dashboard=true", "--dashboard-host=127.0.0.1"]
        options += [f"--dashboard-port={self._dashboard}"]
        self._stack.enter_context(node(self.base, self.nowhere, *options))
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stack.close()

    def submit(self, recipe: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """Submit ``python -m flows run RECIPE`` with this checkout's code, and wait for its end."""
        variables = {
            "MLFLOW_TRACKING_URI": f"sqlite:///{self.base / 'mlflow.db'}",
            "UMIM_MACHINE_LOCK": str(self.base / "lock"),
            "RAY_ADDRESS": "auto",
            **environment,
        }
        command = ["job", "submit", "--address", f"http://127.0.0.1:{self._dashboard}"]
        command += ["--working-dir", str(ROOT)]
        command += ["--runtime-env-json", json.dumps({"env_vars": variables})]
        run = [sys.executable, "-m", "flows", "run", recipe]
        ray = [sys.executable, "-m", "ray.scripts.scripts"]
        for _ in range(20):
            done = run_command(*ray, *command, "--", *run, cwd=self.nowhere, seconds=1200)
            if "No available agent" not in done.stderr:  # a new node's agent takes a while
                break
            time.sleep(3)
        return done


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as started:
        yield started


def test_a_submitted_job_runs_and_its_artifacts_stay(cluster: Cluster, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "small.yaml", cluster={"workers": 1})
    refused = cluster.submit(recipe)
    assert refused.returncode == 1
    assert "the artifact root must outlive the Ray job" in refused.stdout + refused.stderr

    done = cluster.submit(recipe, UMIM_ROOT=str(tmp_path / "root"))
    assert done.returncode == 0, done.stdout + done.stderr
    cluster.stop()
    stages = {
        path.parent.parent.name: path.parent for path in tmp_path.glob("root/*/*/manifest.json")
    }
    assert {"corpus", "tokenize", "count", "filter", "distill", "evaluate", "report"} <= set(stages)
    for artifact in stages.values():
        manifest = read_json(artifact / "manifest.json")
        assert isinstance(manifest, dict) and manifest["digest"] == directory_digest(artifact)
