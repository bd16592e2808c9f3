"""Services of one machine as processes: Prefect's server and worker, MLflow; on loopback only.

Each runs in a session of its own and outlives the command that started it. Its processes are those
that carry its log's path in their environment.
"""

from __future__ import annotations

import os
import signal
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

from tasks.cluster.ray_cluster import CHECKOUT, NO_TELEMETRY
from tasks.tracking.tracker import sqlite_address
from umim_core.errors import ClusterError, require
from umim_core.store.locking import directory_lock

START_SECONDS: Final = 180.0
_STOP_SECONDS: Final = 15.0
_ANSWER_SECONDS: Final = 2.0
_LOOPBACK: Final = "127.0.0.1"
POOL: Final = "umim-pool"
_LOG, _PORT = "UMIM_SERVICE_LOG", "UMIM_SERVICE_PORT"  # in the environment of its processes
# Registers the deployments, then becomes the worker.
_WORK: Final = '"$0" -m flows deploy && exec "$0" -m prefect worker start --pool "$1" --name "$2"'


@dataclass(frozen=True)
class Service:
    """A process to be kept running."""

    name: str
    command: Sequence[str]
    # Answers with success when it can be used; of a Prefect worker: lists those of its pool.
    health: str
    port: int | None = None  # a worker does not listen
    environment: Mapping[str, str] = field(default_factory=dict)  # besides the command line's

    @property
    def url(self) -> str | None:
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
    api, mlflow = f"http://{_LOOPBACK}:{prefect_port}/api", f"http://{_LOOPBACK}:{mlflow_port}"
    quiet = {"PREFECT_HOME": str(folder / "prefect"), **NO_TELEMETRY}
    here = ["--host", _LOOPBACK, "--port"]
    serve = [sys.executable, "-m", "prefect", "server", "start", *here, str(prefect_port)]
    track = [sys.executable, "-m", "mlflow", "server", *here, str(mlflow_port), "--workers", "1"]
    track += ["--serve-artifacts", "--artifacts-destination", str(folder / "mlflow-artifacts")]
    if "MLFLOW_BACKEND_STORE_URI" not in os.environ:
        track += ["--backend-store-uri", sqlite_address(folder / "mlflow.db")]
    worker = "prefect-worker"
    work = ["sh", "-c", _WORK, sys.executable, POOL, worker]
    workers = f"{api}/work_pools/{POOL}/workers/filter"
    addresses = {"PREFECT_API_URL": api, "MLFLOW_TRACKING_URI": mlflow}
    return [
        Service("prefect-server", serve, f"{api}/health", prefect_port, quiet),
        Service("mlflow", track, f"{mlflow}/health", mlflow_port, quiet),
        Service(worker, work, workers, environment=quiet | addresses),
    ]


def up(folder: Path, services: Sequence[Service]) -> list[ServiceState]:
    """Start what does not run, one after the other, and wait until each answers."""
    folder.mkdir(parents=True, exist_ok=True)
    with directory_lock(folder, wait_seconds=START_SECONDS):
        for service in services:
            if service.port is not None:  # another call may have started it meanwhile
                _port(folder, service.name, service.port, service.port)
            began = _state(folder, service).state == "down" and _start(folder, service)
            deadline = time.monotonic() + START_SECONDS
            while (state := _state(folder, service)).state != "running":
                # A process shows no environment while it begins, or changes its program.
                lives = state.state == "starting" or (began and began.poll() is None)
                why = "" if lives else "it has ended"
                if time.monotonic() > deadline:
                    why = f"no answer in {START_SECONDS:.0f} s"
                    if began and lives and state.state == "down":  # hidden: `down` finds it not
                        os.killpg(began.pid, signal.SIGKILL)
                        began.wait()
                rule, remedy = f"{service.name} must start", f"Its last lines are in {state.log}."
                require(not why, ClusterError, rule, why, remedy)
                time.sleep(0.2)
    return status(folder, services)


def down(folder: Path, services: Sequence[Service]) -> list[ServiceState]:
    """End the services, the last one first, with all their processes."""
    folder.mkdir(parents=True, exist_ok=True)
    with directory_lock(folder, wait_seconds=START_SECONDS):
        for service in reversed(services):
            while family := _processes(folder, service.name):  # what it starts as it ends, too
                with suppress(psutil.NoSuchProcess):
                    family[0].terminate()
                for process in psutil.wait_procs(family, timeout=_STOP_SECONDS)[1]:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
                psutil.wait_procs(family, timeout=_STOP_SECONDS)
    return status(folder, services)


def status(folder: Path, services: Sequence[Service]) -> list[ServiceState]:
    return [_state(folder, service) for service in services]


def _state(folder: Path, service: Service) -> ServiceState:
    family = _processes(folder, service.name, runs=False)
    log = str(_log(folder, service.name))
    if not family:
        return ServiceState(service.name, "down", None, service.url, log)
    state = "running" if _answers(service, family[0].create_time()) else "starting"
    return ServiceState(service.name, state, family[0].pid, service.url, log)


def _answers(service: Service, started: float) -> bool:
    try:
        if service.port is not None:
            return httpx.get(service.health, timeout=_ANSWER_SECONDS).is_success
        workers = httpx.post(service.health, json={}, timeout=_ANSWER_SECONDS)
    except httpx.HTTPError:
        return False
    return workers.is_success and any(
        datetime.fromisoformat(worker["last_heartbeat_time"]).timestamp() >= started
        for worker in workers.json()
        if worker["name"] == service.name
    )


def _start(folder: Path, service: Service) -> subprocess.Popen[bytes]:
    if service.port is not None:  # what listens there would answer in its place
        with socket.socket() as probe:
            free = probe.connect_ex((_LOOPBACK, service.port)) != 0
        rule = f"the port of {service.name} must be free"
        remedy = "End what listens there, or choose another port."
        require(free, ClusterError, rule, service.port, remedy)
    path = _log(folder, service.name)
    marks = {_LOG: str(path), _PORT: str(service.port or "")}
    with path.open("ab") as log:
        return subprocess.Popen(  # noqa: S603  commands are our own
            service.command,
            cwd=CHECKOUT,
            env={**os.environ, **service.environment, **marks},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _port(folder: Path, name: str, chosen: int | None, usual: int) -> int:
    """Return the port of a service: the one that it has if it runs, else the chosen one."""
    ports = list[int]()
    for process in _processes(folder, name, runs=False)[:1]:
        with suppress(psutil.Error, KeyError):  # it ended meanwhile
            ports.append(int(process.environ()[_PORT]))
    rule = f"{name} runs already, on port {ports}"
    remedy = "Leave the port out, or end it first: `python -m flows down`."
    require(not ports or chosen in (None, *ports), ClusterError, rule, chosen, remedy)
    return next(iter(ports), chosen or usual)


def _processes(folder: Path, name: str, *, runs: bool = True) -> list[psutil.Process]:
    """Return the processes of a service, the first one first, with the flow runs of a worker."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # of another user, or gone
            environment = process.environ()
            run = "PREFECT__FLOW_RUN_ID" in environment
            if environment.get(_LOG) == str(_log(folder, name)) and (runs or not run):
                found.append((process.create_time(), process.pid, process))
    return [process for _, _, process in sorted(found)]


def _log(folder: Path, name: str) -> Path:
    return folder / f"{name}.log"
