"""A job submitted to a Ray cluster brings its code along, and what it builds outlives the cluster.

Needs Ray's dashboard: ``pip install --no-deps --require-hashes -r requirements/server.txt``.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from support.processes import ROOT, run_command
from support.ray_nodes import node
from support.servers import free_port
from support.small_recipe import write_recipe
from umim_core.store.artifacts import directory_digest, read_json

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        importlib.util.find_spec("aiohttp_cors") is None,
        reason="no Ray dashboard: requirements/server.txt is not installed",
    ),
]


def submit(base: Path, dashboard: int, recipe: Path, **environment: str) -> CompletedProcess[str]:
    """Submit ``python -m flows run RECIPE`` with this checkout's code, and wait for its end."""
    variables = {
        "MLFLOW_TRACKING_URI": f"sqlite:///{base / 'mlflow.db'}",
        "UMIM_MACHINE_LOCK": str(base / "lock"),
        "RAY_ADDRESS": "auto",
        **environment,
    }
    command = ["job", "submit", "--address", f"http://127.0.0.1:{dashboard}"]
    command += ["--working-dir", str(ROOT)]
    command += ["--runtime-env-json", json.dumps({"env_vars": variables}), "--"]
    run = [sys.executable, "-m", "flows", "run", recipe]
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    for _ in range(20):
        done = run_command(*ray, *command, *run, cwd=base / "nowhere", seconds=1200)
        if "No available agent" not in done.stderr:  # a new node's agent takes a while
            break
        time.sleep(3)
    return done


def test_a_submitted_job_runs_and_its_artifacts_stay(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "small.yaml", cluster={"workers": 1})
    (tmp_path / "nowhere").mkdir()  # the node has no checkout of its own
    dashboard = free_port()
    options = ["--head", "--node-ip-address=127.0.0.1", f"--port={free_port()}", "--num-cpus=2"]
    options += ["--include-dashboard=true", "--dashboard-host=127.0.0.1"]
    with node(tmp_path, tmp_path / "nowhere", *options, f"--dashboard-port={dashboard}"):
        refused = submit(tmp_path, dashboard, recipe)
        assert refused.returncode == 1
        assert "the artifact root must outlive the Ray job" in refused.stdout + refused.stderr
        done = submit(tmp_path, dashboard, recipe, UMIM_ROOT=str(tmp_path / "root"))
        assert done.returncode == 0, done.stdout + done.stderr
    stages = {
        path.parent.parent.name: path.parent for path in tmp_path.glob("root/*/*/manifest.json")
    }
    assert {"corpus", "tokenize", "count", "filter", "distill", "evaluate", "report"} <= set(stages)
    for artifact in stages.values():
        manifest = read_json(artifact / "manifest.json")
        assert isinstance(manifest, dict) and manifest["digest"] == directory_digest(artifact)
