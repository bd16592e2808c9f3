"""The served route: a real Prefect server and worker, the literal command, twice at once."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from support.processes import output_of, run_command
from support.servers import free_port
from support.small_recipe import write_recipe
from support.traces import Descendants
from support.tracked_runs import runs_of
from tasks.cluster.ray_cluster import require_loopback
from tasks.run.prefect_runs import SILENCE

ROOT = Path(__file__).resolve().parents[2]
PREFECT = Path(sys.executable).with_name("prefect")
DISTILL = {"max_steps": 40, "batch_size": 2, "validation_rows": 2, "checkpoint_every": 2}
SECONDS = 5.0
WORKER = ["worker", "start", "--pool", "umim-pool", "--type", "process"]

pytestmark = pytest.mark.full


@contextmanager
def _service(
    arguments: list[str], environment: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a Prefect service; TERM at the end, a bounded wait, then KILL."""
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [str(PREFECT), *arguments],
            cwd=ROOT,
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):  # a test may have killed it
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(20)


def _wait_for(url: str) -> None:
    deadline = time.monotonic() + 180
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310  # loopback
                if answer.status == 200:
                    return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)


@dataclass
class Served:
    """A Prefect server with a worker: their folder, their environment, the worker's process."""

    base: Path
    environment: dict[str, str]
    worker: subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    base = tmp_path_factory.mktemp("served")
    port = free_port()
    write_recipe(base / "served.yaml", cluster={"workers": 1})
    environment = {
        **os.environ,
        "PREFECT_HOME": str(base / "prefect"),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "UMIM_ROOT": str(base / "root"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{base / 'mlflow.db'}",
    }

    with ExitStack() as stack:
        start = ["server", "start", "--host", "127.0.0.1", "--port", str(port)]
        stack.enter_context(_service(start, environment, base / "server.log"))
        _wait_for(f"http://127.0.0.1:{port}/api/health")
        deploy = [sys.executable, "-m", "flows", "deploy"]
        subprocess.run(deploy, cwd=ROOT, env=environment, check=True, timeout=280)
        worker = stack.enter_context(_service(WORKER, environment, base / "worker.log"))
        yield Served(base, environment, worker)


def test_two_launches_of_one_deployment_share_every_stage(served: Served) -> None:
    base, environment = served.base, served.environment
    command = [str(PREFECT), "deployment", "run", "umim/full-pipeline", "--watch"]
    command += ["--param", f"recipe={base / 'served.yaml'}"]
    watch = Descendants()
    runs = [
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for _ in range(2)
    ]
    for process in runs:
        with watch:
            output, _ = process.communicate(timeout=900)
        log = (base / "worker.log").read_text(encoding="utf-8", errors="replace")[-4000:]
        assert process.returncode == 0, output.decode() + log
    require_loopback(watch.sockets)
    names = {name for name, _, _ in watch.sockets}
    assert {"gcs_server", "raylet"} <= names, "the clusters of the runs"
    assert any(name.startswith(("python", "prefect", "uvicorn")) for name in names), "the server"
    artifacts = [p.parent for p in base.glob("root/*/*/manifest.json")]
    stages = [p.parent.name for p in artifacts]
    assert {"corpus", "count", "distill", "evaluate", "report"} <= set(stages)
    assert stages.count("distill") == 1
    assert not list(base.glob("root/*/*.partial"))
    kinds = [run.data.tags["umim.kind"] for run in runs_of(environment["MLFLOW_TRACKING_URI"])]
    assert kinds.count("pipeline") == 1
    assert kinds.count("stage") == len(artifacts)
    assert kinds.count("comparison") == 1


def _digest(base: Path) -> str:
    (manifest,) = base.glob("root/distill/*/manifest.json")
    return str(json.loads(manifest.read_text(encoding="utf-8"))["digest"])


def _wait_for_step(base: Path, step: int) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        done = base.glob("root/distill/*.partial/whole/state/step-*/manifest.json")
        if any(int(path.parent.name[5:]) >= step for path in done):
            return
        time.sleep(0.05)
    raise AssertionError(_worker_log(base))


def _worker_log(base: Path) -> str:
    return (base / "worker.log").read_text(encoding="utf-8", errors="replace")[-4000:]


def _belongs(process: psutil.Process, flow_run: str) -> bool:
    try:
        return process.environ().get("PREFECT__FLOW_RUN_ID") == flow_run
    except psutil.Error:
        return False


def test_a_cancelled_flow_run_is_gone_in_seconds_and_its_deployment_resumes(
    served: Served,
) -> None:
    base, environment = served.base, served.environment
    shutil.rmtree(base / "root" / "distill", ignore_errors=True)
    recipe = write_recipe(base / "cancelled.yaml", distill=DISTILL, cluster={"workers": 2})

    def call(command: list[str]) -> str:
        return output_of(*command, seconds=900, **environment)

    number = _launch(served, recipe)
    _wait_for_step(base, 4)
    started = [process for process in psutil.process_iter() if _belongs(process, number)]
    started += [child for process in started for child in process.children(recursive=True)]
    assert any("RayTrainWorker" in process.name() for process in started)
    call([str(PREFECT), "flow-run", "cancel", number])
    assert psutil.wait_procs(started, timeout=SECONDS)[1] == [], _worker_log(base)
    tracked = runs_of(environment["MLFLOW_TRACKING_URI"], query="run_name = 'umim cancelled'")
    assert [run.info.status for run in tracked] == ["KILLED"]
    assert "Cancelled" in call([str(PREFECT), "flow-run", "inspect", number])
    _wait_for_state(served, _launch(served, recipe), "Completed", 900)
    resumed = _digest(base)
    shutil.rmtree(base / "root" / "distill")
    call([sys.executable, "-m", "flows", "run", str(recipe), "--flow", "distill"])
    assert _digest(base) == resumed


def test_watching_a_failed_run_shows_why(served: Served) -> None:
    command = [str(PREFECT), "deployment", "run", "umim/full-pipeline", "--watch"]
    # Relative, so that the message also shows that it was found from the worker's folder.
    command += ["--param", "recipe=infra/recipes/tables/perplexity-smollm2.yaml"]
    done = run_command(*command, seconds=280, **served.environment)
    assert done.returncode == 1
    told = " ".join(done.stdout.split())
    assert "flow umim needs a recipe of kind pipeline; got infra/recipes/tables/" in told


def _launch(served: Served, recipe: Path) -> str:
    """Launch the deployment, return the id of its run."""
    command = [str(PREFECT), "deployment", "run", "umim/full-pipeline"]
    command += ["--param", f"recipe={recipe}"]
    printed = output_of(*command, seconds=180, **served.environment)
    (number,) = re.findall(r"UUID: ([0-9a-f-]{36})", printed)
    return str(number)


def _wait_for_state(served: Served, number: str, name: str, seconds: float) -> str:
    """Return the state of a flow run once it is the wanted one."""
    deadline, seen = time.monotonic() + seconds, ""
    while seen != name:
        assert time.monotonic() < deadline, f"{seen}, not {name}: {_worker_log(served.base)}"
        time.sleep(0.5)
        run = httpx.get(f"{served.environment['PREFECT_API_URL']}/flow_runs/{number}", timeout=60)
        seen = run.json()["state"]["name"]
    return seen


def test_a_run_killed_with_its_worker_is_crashed_and_the_one_that_waited_goes_on(
    served: Served,
) -> None:
    path, cluster = served.base / "killed.yaml", {"workers": 1}
    training = {**DISTILL, "max_steps": 200}  # it must still run when the second launch waits
    recipe = write_recipe(path, seed=3, distill=training, cluster=cluster)
    number = _launch(served, recipe)
    _wait_for_step(served.base, 2)
    waiting = _launch(served, recipe)
    _wait_for_state(served, waiting, "AwaitingConcurrencySlot", 120)
    os.killpg(served.worker.pid, signal.SIGKILL)
    for process in [process for process in psutil.process_iter() if _belongs(process, number)]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _wait_for_state(served, number, "Crashed", SILENCE.total_seconds() + 60)
    with _service(WORKER, served.environment, served.base / "worker.log"):
        assert _wait_for_state(served, waiting, "Completed", 900) == "Completed"
