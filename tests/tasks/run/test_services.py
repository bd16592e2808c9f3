"""Local services: started once, found again, refused on a taken port, ended with their children.

The real ones, from ``up`` to ``down``: ``flows/test_served.py``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import httpx
import psutil
import pytest

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
    command += ["--directory", str(tmp_path)]
    made = Service("mlflow", command, f"http://127.0.0.1:{port}", port)
    yield made
    down(tmp_path, [made])


def test_a_service_outlives_its_command_is_found_again_and_ends_with_its_children(
    service: Service, tmp_path: Path
) -> None:
    assert [one.state for one in status(tmp_path, [service])] == ["down"]
    program = "from pathlib import Path; from tasks.run.services import Service, up; "
    program += f"print(up(Path({str(tmp_path)!r}), [{service!r}])[0].state)"
    assert output_of(sys.executable, "-c", program) == "running\n"
    (first,) = status(tmp_path, [service])
    assert first.state == "running" and first.pid is not None
    assert up(tmp_path, [service]) == [first]

    other = replace(service, name="other")
    with pytest.raises(ClusterError, match="the port of other must be free"):
        up(tmp_path, [other])
    assert service.url and httpx.get(service.url, timeout=120).is_success
    assert [one.state for one in status(tmp_path, [service, other])] == ["running", "down"]

    assert local_services(tmp_path)[1].port == service.port
    assert local_services(tmp_path, None, service.port)[1].port == service.port
    with pytest.raises(ClusterError, match=rf"mlflow runs already, on port \[{service.port}\]"):
        local_services(tmp_path, None, 1)
    with pytest.raises(ClusterError, match="mlflow runs already"):  # started by another call
        up(tmp_path, [replace(service, port=1)])

    family = [psutil.Process(first.pid), *psutil.Process(first.pid).children(recursive=True)]
    assert len(family) == 2
    (after,) = down(tmp_path, [service])
    assert (after.state, after.pid) == ("down", None)
    assert psutil.wait_procs(family, timeout=5)[1] == []
    assert down(tmp_path, [service]) == [after]
    run = replace(service, environment={"PREFECT__FLOW_RUN_ID": "of a worker that was killed"})
    services._start(tmp_path, run)
    while not services._processes(tmp_path, run.name):
        time.sleep(0.01)
    assert status(tmp_path, [run]) == [after]
    assert local_services(tmp_path)[1].port == 5000


@pytest.mark.parametrize(
    ("listens", "program", "seconds", "why"),
    [
        (True, "import sys; sys.exit('no such database')", 120.0, "it has ended"),
        (False, "import time; time.sleep(60)", 0.5, "no answer in"),
    ],
)
def test_a_service_that_does_not_start_names_its_log(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    listens: bool,
    program: str,
    seconds: float,
    why: str,
) -> None:
    monkeypatch.setattr(services, "START_SECONDS", seconds)
    health = f"http://127.0.0.1:{free_port()}/"
    bad = Service("bad", [sys.executable, "-c", program], health, free_port() if listens else None)
    try:
        with pytest.raises(ClusterError, match=rf"bad must start; got {why}.*bad\.log"):
            up(tmp_path, [bad])
    finally:
        down(tmp_path, [bad])
    assert ("no such database" in (tmp_path / "bad.log").read_text()) == (seconds > 1)


@pytest.mark.parametrize(
    ("looks", "left"),
    [([True, False, False, True], "starting"), (repeat(True), "down")],
    ids=["it changes its program", "never shown"],
)
def test_a_process_may_show_no_environment_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: Iterable[bool], left: str
) -> None:
    environ, hidden = psutil.Process.environ, iter(looks)

    def shown(process: psutil.Process) -> dict[str, str]:
        found = environ(process)
        ours = str(tmp_path / "slow.log") in found.values()
        return {} if ours and next(hidden, False) else found

    monkeypatch.setattr(psutil.Process, "environ", shown)
    monkeypatch.setattr(services, "START_SECONDS", 2.0)
    slow = Service("slow", [sys.executable, "-c", "import time; time.sleep(60)"], "http://x/", 1)
    try:
        with pytest.raises(ClusterError, match="no answer in"):
            up(tmp_path, [slow])
        monkeypatch.setattr(psutil.Process, "environ", environ)
        assert [one.state for one in status(tmp_path, [slow])] == [left]
    finally:
        down(tmp_path, [slow])


def test_what_a_service_starts_as_it_ends_is_ended_too(tmp_path: Path) -> None:
    script = "trap 'sleep 600 & exit' TERM; echo ready; while :; do sleep 0.1; done"
    late = Service("late", ["sh", "-c", script], "http://x/")
    services._start(tmp_path, late)
    while "ready" not in (tmp_path / "late.log").read_text():
        time.sleep(0.01)
    assert [one.state for one in down(tmp_path, [late])] == ["down"]


def test_everything_listens_on_loopback_and_keeps_its_data_in_the_folder(tmp_path: Path) -> None:
    server, mlflow, worker = local_services(tmp_path, 1, 2)
    for made in (server, mlflow):
        assert made.command[made.command.index("--host") + 1] == "127.0.0.1"
    assert worker.port is None and worker.environment["PREFECT_API_URL"].startswith("http://127.")
    for made in (server, worker):
        assert made.environment["PREFECT_HOME"] == str(tmp_path / "prefect")
    assert f"sqlite:///{tmp_path / 'mlflow.db'}" in mlflow.command
