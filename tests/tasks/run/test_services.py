"""Local services: started once, found again, refused on a taken port, ended with their children."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest

from support.busy_machine import within
from support.processes import output_of
from support.servers import free_port
from tasks.run import services
from tasks.run.services import Service, down, local_services, status, up
from umim_core.errors import ClusterError

FATHER = (
    "import subprocess, sys; subprocess.run([sys.executable, '-m', 'http.server', *sys.argv[1:]])"
)


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A server with a child that listens, as those of Prefect and MLflow are.

    The child ends by a kill alone: its father does not hand SIGTERM on.
    """
    monkeypatch.setattr(services, "_STOP_SECONDS", 0.5)
    monkeypatch.setattr(services, "_ANSWER_SECONDS", 120.0)
    port = free_port()
    command = [sys.executable, "-c", FATHER, str(port), "--bind", "127.0.0.1"]
    made = Service("files", [*command, "--directory", str(tmp_path)], port)
    yield made
    down(tmp_path, [made])


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_service_is_started_once_found_again_and_ended_with_its_children(
    service: Service, tmp_path: Path
) -> None:
    assert [of.state for of in status(tmp_path, [service])] == ["down"]
    (first,) = up(tmp_path, [service])
    assert first.state == "running" and first.pid is not None
    assert up(tmp_path, [service]) == [first]
    family = [psutil.Process(first.pid), *psutil.Process(first.pid).children(recursive=True)]
    assert len(family) == 2
    (after,) = down(tmp_path, [service])
    assert (after.state, after.pid) == ("down", None)
    assert within(5, lambda: not any(map(alive, family)), *(process.pid for process in family))
    assert down(tmp_path, [service]) == [after]


def test_a_service_outlives_the_command_that_started_it(service: Service, tmp_path: Path) -> None:
    lines = (
        "from pathlib import Path",
        "from tasks.cluster.stopping import stoppable",
        "from tasks.run.services import Service, up",
        f"with stoppable(): print(up(Path({str(tmp_path)!r}), [{service!r}])[0].state)",
    )
    # Its guard, which clears up behind it, holds standard error to its own end.
    assert output_of(sys.executable, "-c", "\n".join(lines)) == "running\n"
    assert [of.state for of in status(tmp_path, [service])] == ["running"]


def test_a_taken_port_is_refused_and_what_listens_there_is_left_alone(
    service: Service, tmp_path: Path
) -> None:
    up(tmp_path, [service])
    other = replace(service, name="other")
    with pytest.raises(ClusterError, match="the port of other must be free"):
        up(tmp_path, [other])
    assert service.url and httpx.get(service.url, timeout=120).is_success
    assert [of.state for of in status(tmp_path, [service, other])] == ["running", "down"]


@pytest.mark.parametrize("part", ["itself", "before", "worker"])
def test_a_service_that_ends_at_once_names_its_log(tmp_path: Path, part: str) -> None:
    bad = [sys.executable, "-c", "import sys; sys.exit('no such database')"]
    made = {
        "itself": Service("bad", bad, free_port()),
        "before": Service("bad", [sys.executable, "-c", ""], before=[bad]),
        "worker": Service("bad", bad, pool_url=f"http://127.0.0.1:{free_port()}/api/work_pools/a"),
    }[part]
    with pytest.raises(ClusterError, match="bad must start") as caught:
        up(tmp_path, [made])
    log = tmp_path / "bad.log"
    assert str(log) in str(caught.value) and "no such database" in log.read_text()


def test_a_running_service_keeps_its_port(service: Service, tmp_path: Path) -> None:
    mlflow = replace(service, name="mlflow")
    up(tmp_path, [mlflow])
    try:
        assert local_services(tmp_path)[1].port == service.port
        assert local_services(tmp_path, None, service.port)[1].port == service.port
        with pytest.raises(ClusterError, match=f"mlflow runs already, on port {service.port}"):
            local_services(tmp_path, None, 1)
    finally:
        down(tmp_path, [mlflow])
    assert local_services(tmp_path)[1].port == 5000


SLOW = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.mark.parametrize("part", ["itself", "before"])
def test_a_service_that_is_slow_names_its_log_and_what_it_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(services, "START_SECONDS", 0.5)
    late = {
        "itself": Service("late", SLOW, free_port()),
        "before": Service("late", SLOW, free_port(), before=[SLOW]),
    }[part]
    why = {"itself": "no answer in", "before": r"time\.sleep\(60\) has not ended in"}[part]
    try:
        with pytest.raises(ClusterError, match=rf"late must start; got .*{why}.*late\.log"):
            up(tmp_path, [late])
    finally:
        down(tmp_path, [late])


def test_everything_listens_on_loopback_and_keeps_its_data_in_the_folder(tmp_path: Path) -> None:
    server, mlflow, worker = local_services(tmp_path, 1, 2)
    for made in (server, mlflow):
        assert made.command[made.command.index("--host") + 1] == "127.0.0.1"
    assert worker.port is None and worker.environment["PREFECT_API_URL"].startswith("http://127.")
    assert all(
        of.environment["PREFECT_HOME"] == str(tmp_path / "prefect") for of in (server, worker)
    )
    assert f"sqlite:///{tmp_path / 'mlflow.db'}" in mlflow.command


@pytest.mark.full
def test_up_starts_real_servers_with_every_deployment_and_down_ends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMIM_ROOT", str(tmp_path))
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    ports = ["--prefect-port", str(free_port()), "--mlflow-port", str(free_port())]

    def states(action: str) -> list[dict[str, str]]:
        command = [sys.executable, "-m", "flows", action, *ports, "--json"]
        services: list[dict[str, str]] = json.loads(output_of(*command))["services"]
        return services

    try:
        first = states("up")
        assert {of["state"] for of in first} == {"running"}
        assert states("status") == states("up") == first
        api = f"{first[0]['url']}/api"
        names = {of["name"] for of in httpx.post(f"{api}/deployments/filter", json={}).json()}
        assert {"full-pipeline", "benchmark", "table"} <= names
    finally:
        last = states("down")
    assert {of["state"] for of in last} == {"down"}
