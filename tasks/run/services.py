"""Services of one machine as processes: Prefect's server and worker, MLflow; on loopback only.

Each runs in a session of its own and outlives the command that started it. A record in the folder
names its process by number and start time, so a number that was given anew is not taken for it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

import httpx
import psutil

from tasks.cluster.ray_cluster import CHECKOUT
from tasks.tracking.tracker import sqlite_address
from umim_core.errors import ClusterError
from umim_core.store.disk import write_bytes
from umim_core.store.locking import directory_lock

START_SECONDS: Final = 180.0
_STOP_SECONDS: Final = 15.0
_ANSWER_SECONDS: Final = 2.0
_LOOPBACK: Final = "127.0.0.1"
POOL: Final = "umim-pool"


@dataclass(frozen=True)
class Service:
    """A process to be kept running."""

    name: str  # of its record and its log
    command: Sequence[str]
    port: int | None = None  # where it listens; a worker of Prefect does not
    health: str = "/"  # path that answers 200 when it can be used
    pool_url: str | None = None  # of a worker: address of the pool, where it reports
    environment: Mapping[str, str] = field(default_factory=dict)  # besides the command line's
    before: Sequence[Sequence[str]] = ()  # commands that end before it starts: a registration

    @property
    def url(self) -> str | None:
        """Its address; None for a service that does not listen."""
        return None if self.port is None else f"http://{_LOOPBACK}:{self.port}"


@dataclass(frozen=True)
class ServiceState:
    """A service as it is found: ``running`` (it answers), ``starting`` or ``down``."""

    name: str
    state: str
    pid: int | None
    url: str | None
    log: str


def local_services(
    folder: Path, prefect_port: int | None = None, mlflow_port: int | None = None
) -> list[Service]:
    """Return Prefect's server, MLflow and a Prefect worker, in the order in which they start.

    Without a port, it is the one that the running service has, or Prefect's and MLflow's own.
    Databases are sqlite files in the folder; ``PREFECT_API_DATABASE_CONNECTION_URL`` and
    ``MLFLOW_BACKEND_STORE_URI`` name others.
    """
    prefect_port = _port(folder, "prefect-server", prefect_port, 4200)
    mlflow_port = _port(folder, "mlflow", mlflow_port, 5000)
    prefect = [sys.executable, "-m", "prefect"]
    api = {"PREFECT_API_URL": f"http://{_LOOPBACK}:{prefect_port}/api"}
    tracking = {"MLFLOW_TRACKING_URI": f"http://{_LOOPBACK}:{mlflow_port}"}
    quiet = {
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "1",
    }
    server = [*prefect, "server", "start", "--host", _LOOPBACK, "--port", str(prefect_port)]
    mlflow = [sys.executable, "-m", "mlflow", "server", "--host", _LOOPBACK]
    mlflow += ["--port", str(mlflow_port), "--workers", "1", "--serve-artifacts"]
    mlflow += ["--artifacts-destination", str(folder / "mlflow-artifacts")]
    if "MLFLOW_BACKEND_STORE_URI" not in os.environ:
        mlflow += ["--backend-store-uri", sqlite_address(folder / "mlflow.db")]
    deploy = [sys.executable, "-m", "flows", "deploy"]
    worker = [*prefect, "worker", "start", "--pool", POOL, "--name", "prefect-worker"]
    return [
        Service("prefect-server", server, prefect_port, "/api/health", environment=quiet),
        Service("mlflow", mlflow, mlflow_port, "/health", environment=quiet),
        Service(
            "prefect-worker",
            worker,
            pool_url=f"{api['PREFECT_API_URL']}/work_pools/{POOL}",
            environment=quiet | api | tracking,
            before=(deploy,),
        ),
    ]


def up(folder: Path, services: Sequence[Service]) -> list[ServiceState]:
    """Start what does not run, one after the other, and wait until each answers."""
    folder.mkdir(parents=True, exist_ok=True)
    with directory_lock(folder, wait_seconds=START_SECONDS):
        for service in services:
            if _process(folder, service.name) is None:
                _start(folder, service)
            _wait(folder, service)
    return status(folder, services)


def down(folder: Path, services: Sequence[Service]) -> list[ServiceState]:
    """End the services, the last one first, with all their processes."""
    folder.mkdir(parents=True, exist_ok=True)
    with directory_lock(folder, wait_seconds=START_SECONDS):
        for service in reversed(services):
            process = _process(folder, service.name)
            if process is not None:
                _end(process)
            _record(folder, service.name).unlink(missing_ok=True)
    return status(folder, services)


def status(folder: Path, services: Sequence[Service]) -> list[ServiceState]:
    """Return how each service is."""
    states = []
    for service in services:
        process = _process(folder, service.name)
        alive = "running" if process and _answers(service, process) else "starting"
        states.append(
            ServiceState(
                service.name,
                "down" if process is None else alive,
                None if process is None else process.pid,
                service.url,
                str(_log(folder, service.name)),
            )
        )
    return states


def _start(folder: Path, service: Service) -> None:
    if service.port is not None:
        with socket.socket() as probe:
            if probe.connect_ex((_LOOPBACK, service.port)) == 0:
                raise ClusterError(
                    f"the port of {service.name} must be free",
                    service.port,
                    "End what listens there, or choose another port.",
                )
    with _log(folder, service.name).open("ab") as log:
        environment = {**os.environ, **service.environment}
        for command in service.before:
            words = " ".join(command)
            try:
                done = subprocess.run(  # noqa: S603  commands are our own
                    command,
                    cwd=CHECKOUT,
                    env=environment,
                    stdout=log,
                    stderr=log,
                    timeout=START_SECONDS,
                )
            except subprocess.TimeoutExpired as error:
                why = f"{words} has not ended in {START_SECONDS:.0f} s"
                raise _failed(folder, service, why) from error
            if done.returncode:
                raise _failed(folder, service, f"status {done.returncode} of {words}")
        process = subprocess.Popen(  # noqa: S603  commands are our own
            service.command,
            cwd=CHECKOUT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    record = {
        "pid": process.pid,
        "started": psutil.Process(process.pid).create_time(),
        "port": service.port,
    }
    write_bytes(_record(folder, service.name), json.dumps(record).encode("ascii"))


def _port(folder: Path, name: str, asked: int | None, usual: int) -> int:
    """Return the port of a service: the one that it has if it runs, else what is asked for."""
    running = None
    if _process(folder, name) is not None:
        running = json.loads(_record(folder, name).read_bytes()).get("port")
    if running is not None and asked not in (None, running):
        raise ClusterError(
            f"{name} runs already, on port {running}",
            asked,
            "Leave the port out, or end it first: `python -m flows down`.",
        )
    return int(running or asked or usual)


def _wait(folder: Path, service: Service) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        process = _process(folder, service.name)
        if process is None:
            raise _failed(folder, service, "it has ended")
        if _answers(service, process):
            return
        if time.monotonic() > deadline:
            raise _failed(folder, service, f"no answer in {START_SECONDS:.0f} s")
        time.sleep(0.2)


def _failed(folder: Path, service: Service, why: str) -> ClusterError:
    log = _log(folder, service.name)
    return ClusterError(f"{service.name} must start", why, f"Its last lines are in {log}.")


def _answers(service: Service, process: psutil.Process) -> bool:
    try:
        if service.url is not None:
            return httpx.get(service.url + service.health, timeout=_ANSWER_SECONDS).is_success
        answer = httpx.post(f"{service.pool_url}/workers/filter", json={}, timeout=_ANSWER_SECONDS)
        began = process.create_time()
        return answer.is_success and any(
            worker["name"] == service.name
            and datetime.fromisoformat(worker["last_heartbeat_time"]).timestamp() >= began
            for worker in answer.json()
        )
    except (httpx.HTTPError, psutil.NoSuchProcess):
        return False


def _process(folder: Path, name: str) -> psutil.Process | None:
    """Return the process of a record; None if it is gone."""
    with suppress(FileNotFoundError, ValueError, KeyError, psutil.NoSuchProcess):
        record = json.loads(_record(folder, name).read_bytes())
        process = psutil.Process(record["pid"])
        same = abs(process.create_time() - record["started"]) < 1.0
        if same and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def _end(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        family = [process, *process.children(recursive=True)]
        process.terminate()
        _, alive = psutil.wait_procs(family, timeout=_STOP_SECONDS)
        for left in alive:
            with suppress(psutil.NoSuchProcess):
                left.kill()
        psutil.wait_procs(alive, timeout=_STOP_SECONDS)


def _record(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _log(folder: Path, name: str) -> Path:
    return folder / f"{name}.log"
