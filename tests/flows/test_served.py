"""The services of a machine: started, found, used by the literal command twice at once, ended."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from flows.cli import app
from support.flow_runs import digests, wait_for_step
from support.processes import ROOT, output_of, run_command
from support.servers import free_port
from support.small_recipe import write_recipe
from support.traces import Descendants
from support.tracked_runs import runs_of
from tasks.cluster.ray_cluster import require_loopback

PREFECT = Path(sys.executable).with_name("prefect")
DISTILL = {"max_steps": 40, "batch_size": 2, "validation_rows": 2, "checkpoint_every": 2}
SECONDS = 5.0
SILENCE = 75  # of infra/crashed-runs.yaml

pytestmark = pytest.mark.full


@dataclass
class Served:
    """The services of a machine: their folder, the environment of commands that use them."""

    base: Path
    environment: dict[str, str]
    states: list[dict[str, Any]]

    @property
    def api(self) -> str:
        return self.environment["PREFECT_API_URL"]

    def call(self, *command: object) -> str:
        return output_of(*command, seconds=900, **self.environment)

    def worker_log(self) -> str:
        return Path(self.states[-1]["log"]).read_text("utf-8", errors="replace")[-4000:]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """What `up` starts, and finds again, until `down` has ended it."""
    base = tmp_path_factory.mktemp("served")
    write_recipe(base / "served.yaml", cluster={"workers": 1})
    ports = free_port(), free_port()
    environment = {
        "UMIM_ROOT": str(base / "root"),
        "PREFECT_HOME": str(base / "prefect"),
        "PREFECT_API_URL": f"http://127.0.0.1:{ports[0]}/api",
        "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{ports[1]}",
    }

    def states(action: str) -> list[dict[str, Any]]:
        options = ["--prefect-port", str(ports[0]), "--mlflow-port", str(ports[1]), "--json"]
        done = CliRunner().invoke(app, [action, *options], env=environment)
        assert done.exit_code == 0, done.output
        found: list[dict[str, Any]] = json.loads(done.stdout)["services"]
        return found

    try:
        first = states("up")
        assert {row["state"] for row in first} == {"running"}
        assert states("status") == states("up") == first
        yield Served(base, environment, first)
    finally:
        last = states("down")
    assert {row["state"] for row in last} == {"down"}


def test_every_flow_has_a_deployment_and_the_operators_limit_of_the_pool_stays(
    served: Served,
) -> None:
    found = httpx.post(f"{served.api}/deployments/filter", json={}, timeout=60).json()
    assert {"full-pipeline", "mine", "distill", "benchmark", "table"} <= {
        row["name"] for row in found
    }
    pool = f"{served.api}/work_pools/umim-pool"
    httpx.patch(pool, json={"concurrency_limit": 3}, timeout=60).raise_for_status()
    served.call(sys.executable, "-m", "flows", "deploy")
    assert httpx.get(pool, timeout=60).json()["concurrency_limit"] == 3
    automations = httpx.post(f"{served.api}/automations/filter", json={}, timeout=60).json()
    assert [row["trigger"]["within"] for row in automations] == [SILENCE]


def test_two_launches_of_one_deployment_share_every_stage(served: Served) -> None:
    base, environment = served.base, os.environ | served.environment
    command = [str(PREFECT), "deployment", "run", "umim/full-pipeline", "--watch"]
    command += ["--param", f"recipe={base / 'served.yaml'}"]
    watch = Descendants()
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    for process in [subprocess.Popen(command, cwd=ROOT, env=environment, **streams) for _ in "12"]:
        with watch:
            output, _ = process.communicate(timeout=900)
        assert process.returncode == 0, output.decode() + served.worker_log()
    require_loopback(watch.sockets)
    names = {name for name, _, _ in watch.sockets}
    assert {"gcs_server", "raylet"} <= names, "the clusters of the runs"
    assert any(name.startswith(("python", "prefect", "uvicorn")) for name in names), "the server"
    stages = [path.parts[-3] for path in base.glob("root/*/*/manifest.json")]
    assert {"corpus", "count", "distill", "evaluate", "report"} <= set(stages)
    assert stages.count("distill") == 1
    assert not list(base.glob("root/*/*.partial"))
    kinds = [run.data.tags["umim.kind"] for run in runs_of(environment["MLFLOW_TRACKING_URI"])]
    assert kinds.count("pipeline") == 1
    assert kinds.count("stage") == len(stages)
    assert kinds.count("comparison") == 1


def _of_run(flow_run: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("PREFECT__FLOW_RUN_ID") == flow_run:
                found.append(process)
    return found


def test_a_cancelled_flow_run_is_gone_in_seconds_and_its_deployment_resumes(served: Served) -> None:
    base = served.base
    shutil.rmtree(base / "root" / "distill", ignore_errors=True)
    recipe = write_recipe(base / "cancelled.yaml", distill=DISTILL, cluster={"workers": 2})
    number = _launch(served, recipe)
    wait_for_step(base / "root", 4)
    started = _of_run(number)
    started += [child for process in started for child in process.children(recursive=True)]
    assert any("RayTrainWorker" in process.name() for process in started)
    served.call(PREFECT, "flow-run", "cancel", number)
    assert psutil.wait_procs(started, timeout=SECONDS)[1] == [], served.worker_log()
    store = served.environment["MLFLOW_TRACKING_URI"]
    (tracked,) = runs_of(store, query="run_name = 'umim cancelled'")
    assert tracked.info.status == "KILLED"
    assert "Cancelled" in served.call(PREFECT, "flow-run", "inspect", number)
    _wait_for_state(served, _launch(served, recipe), "Completed", 900)
    (resumed,) = digests(base / "root").items() - digests(base / "root", "distill").items()
    shutil.rmtree(base / "root" / "distill")
    served.call(sys.executable, "-m", "flows", "run", recipe, "--flow", "distill")
    assert resumed in digests(base / "root").items()


def test_watching_a_failed_run_shows_why(served: Served) -> None:
    command = [str(PREFECT), "deployment", "run", "umim/full-pipeline", "--watch"]
    # Relative, so that the message also shows that it was found from the worker's folder.
    command += ["--param", "recipe=infra/recipes/tables/perplexity-smollm2.yaml"]
    done = run_command(*command, seconds=280, **served.environment)
    assert done.returncode == 1
    told = " ".join(done.stdout.split())
    assert "flow umim needs a recipe of kind pipeline; got infra/recipes/tables/" in told


def _launch(served: Served, recipe: Path) -> str:
    command = [str(PREFECT), "deployment", "run", "umim/full-pipeline"]
    command += ["--param", f"recipe={recipe}"]
    printed = served.call(*command)
    (number,) = re.findall(r"UUID: ([0-9a-f-]{36})", printed)
    return str(number)


def _wait_for_state(served: Served, number: str, name: str, seconds: float) -> str:
    deadline, seen = time.monotonic() + seconds, ""
    while seen != name:
        assert time.monotonic() < deadline, f"{seen}, not {name}: {served.worker_log()}"
        time.sleep(0.5)
        run = httpx.get(f"{served.api}/flow_runs/{number}", timeout=60)
        seen = run.json()["state"]["name"]
    return seen


def test_a_run_killed_with_its_worker_is_crashed_and_the_one_that_waited_goes_on(
    served: Served,
) -> None:
    path, cluster = served.base / "killed.yaml", {"workers": 1}
    training = {**DISTILL, "max_steps": 200}  # it must still run when the second launch waits
    recipe = write_recipe(path, seed=3, distill=training, cluster=cluster)
    number = _launch(served, recipe)
    wait_for_step(served.base / "root", 2)
    waiting = _launch(served, recipe)
    _wait_for_state(served, waiting, "AwaitingConcurrencySlot", 120)
    worker = psutil.Process(served.states[-1]["pid"])
    worker.kill()
    for process in _of_run(number):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _wait_for_state(served, number, "Crashed", SILENCE + 60)
    served.call(sys.executable, "-m", "flows", "up")  # another worker
    assert _wait_for_state(served, waiting, "Completed", 900) == "Completed"
