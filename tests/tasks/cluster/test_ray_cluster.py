"""A real local cluster: loopback only, one connection, workers that can import this checkout."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess

import psutil
import pytest
import ray

from tasks.cluster import guard
from tasks.cluster.ray_cluster import (
    CHECKOUT,
    ray_cluster,
    require_loopback,
    require_started,
    worker_environment,
)
from umim_core.errors import ClusterError


def _look() -> dict[str, str | None]:
    import umim_core.errors

    names = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "DS_ACCELERATOR", "RAY_AUTH_MODE")
    return {"file": umim_core.errors.__file__, **{name: os.environ.get(name) for name in names}}


def test_workers_import_this_checkout_and_get_passive_threads_by_cpus(two_cores: None) -> None:
    seen = ray.get(ray.remote(_look).options(num_cpus=2).remote())
    assert seen["file"] == str(CHECKOUT / "umim_core" / "errors.py")
    assert seen["OMP_WAIT_POLICY"] == "PASSIVE"
    assert seen["RAY_AUTH_MODE"] == "token"


@pytest.mark.full  # Ray takes twenty seconds to give up
def test_a_caller_without_the_token_is_refused(two_cores: None) -> None:
    program = "import ray, sys; ray.init(address=sys.argv[1]); print('let in')"
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    environment |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    result = _run(program, ray.get_runtime_context().gcs_address, **environment)
    assert "let in" not in result.stdout
    assert "InvalidAuthToken" in result.stderr


def test_a_socket_open_to_others_is_named() -> None:
    with pytest.raises(ClusterError, match=r"127\.0\.0\.1 only; got raylet on 0\.0\.0\.0:80"):
        require_loopback([("gcs_server", "::ffff:127.0.0.1", 81), ("raylet", "0.0.0.0", 80)])  # noqa: S104


def test_the_workers_of_a_remote_cluster_get_nothing_that_is_true_here_only() -> None:
    remote = worker_environment(local=False)
    assert not {"PYTHONPATH", "DS_ACCELERATOR", "GLOO_SOCKET_IFNAME"} & set(remote)
    assert remote["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.parametrize(("name", "least"), [("cpus", 1), ("object_store_bytes", 80 << 20)])
def test_arguments_out_of_bounds_are_refused(name: str, least: int) -> None:
    refused = pytest.raises(ClusterError, match=f"{name} must be at least {least}; got 0")
    with refused, ray_cluster(**{name: 0}):
        pass


def _run(program: str, *words: str, **environment: str) -> CompletedProcess[str]:
    from support.processes import run_command  # workers, which import this file, do not find it

    own = {"PYTHONPATH": str(CHECKOUT), **environment}
    return run_command(sys.executable, "-c", program, *words, seconds=240, without=("RAY_",), **own)


@pytest.mark.parametrize(
    ("address", "mode", "message"),
    [
        ("10.0.0.1:6379", None, "needs an explicit RAY_AUTH_MODE"),
        ("127.0.0.1:9", "token", "must answer; got 127.0.0.1:9"),
        ("somewhere", "token", "must be host:port"),
    ],
)
def test_a_named_cluster_is_refused_with_a_reason(
    address: str, mode: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # tests share a cluster
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with pytest.raises(ClusterError, match=message), ray_cluster(address=address):
        pass


# A fork keeps the guard's pipe open; a program of the driver's own is none of Ray's.
KILLED = """
import os, signal, subprocess, time
from tasks.cluster.ray_cluster import ray_cluster
with ray_cluster(cpus=2, object_store_bytes=100 << 20) as cluster:
    import ray
    waits = [ray.remote(lambda: time.sleep(600)).remote() for _ in range(2)]
    ray.wait(waits, timeout=2)
    own = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    fork = os.fork()
    if not fork:
        os.closerange(1, 3)
        time.sleep(600)
    print(cluster.logs.parents[1], own.pid, fork, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
# A fork keeps the guard's pipe open, for longer than the block may take to end.
FORKED = """
import os, signal, time
from tasks.cluster.ray_cluster import _guarded_folder
with _guarded_folder() as folder:
    fork = os.fork()
    if not fork:
        os.closerange(1, 3)
        time.sleep(60)
        os._exit(0)
    began = time.monotonic()
print(time.monotonic() - began, folder.exists(), os.waitpid(fork, os.WNOHANG)[0])
os.kill(fork, signal.SIGKILL)
"""
FRESH = """
import os, signal
import ray  # before the environment is prepared, as other modules do it
from tasks.cluster.ray_cluster import listening_addresses, ray_cluster
def prefect(*_): pass
signal.signal(signal.SIGTERM, prefect)
RAYS_OWN = {"RAY_CLIENT_MODE", "PYTHONBREAKPOINT"}
before = {k: v for k, v in os.environ.items() if k not in RAYS_OWN}
for _ in range(2):
    with ray_cluster(cpus=1, object_store_bytes=100 << 20):
        print(ray.get(ray.remote(lambda: os.environ["OMP_NUM_THREADS"]).remote()))
        print(sorted({address for _, address, _ in listening_addresses()}))
        print(signal.getsignal(signal.SIGTERM) is prefect)
    print(ray.is_initialized())
print(before == {k: v for k, v in os.environ.items() if k not in RAYS_OWN})
"""


# Ray's own clock runs fast, so that its 30 seconds are half a second.
LATE = """
import time, types
import psutil
from ray._private import node, services
from tasks.cluster.ray_cluster import ray_cluster
from umim_core.errors import ClusterError
def absent(*_): raise RuntimeError("it has not registered")
registered, services.get_node = services.get_node, absent
node.time = types.SimpleNamespace(**{**vars(time), "monotonic": lambda: 60 * time.monotonic()})
try:
    with ray_cluster(cpus=1, object_store_bytes=100 << 20): pass
except ClusterError as error:
    print(error)
print(psutil.Process().children())
services.get_node, node.time = registered, time
with ray_cluster(cpus=1, object_store_bytes=100 << 20) as cluster:
    print(cluster.cpus)
"""


@pytest.mark.full
def test_a_node_that_is_late_is_a_typed_error_leaves_no_process_and_may_be_tried_again() -> None:
    late = _run(LATE)
    assert late.returncode == 0, late.stderr
    message, left, cpus = late.stdout.splitlines()
    assert message.startswith("Ray must start; got local: The current node timed out")
    assert "Run the same command again" in message
    assert (left, cpus) == ("[]", "1")


def test_what_ray_raises_as_it_starts_is_a_typed_error() -> None:
    for raised, again in (
        (Exception("timed out"), True),
        (Exception("full"), False),
        (RuntimeError("timed out"), False),
        (ray.exceptions.RaySystemError("full"), False),
    ):
        with pytest.raises(ClusterError, match=str(raised)) as caught:
            require_started(raised, "local")
        assert caught.value.remedy.startswith("Run the same command again") is again


def _of_the_cluster(folder: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(guard.VARIABLE) == folder:
                found.append(process)
    return found


@pytest.mark.full
def test_a_killed_driver_leaves_nothing_of_ray_and_what_else_it_started() -> None:
    killed = _run(KILLED)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folder, *pids = killed.stdout.split()
    others = [psutil.Process(int(pid)) for pid in pids]
    try:
        deadline = time.monotonic() + 30  # what nobody ends goes on for minutes
        while _of_the_cluster(folder) or Path(folder).exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert all(process.is_running() for process in others)
    finally:
        for process in others:
            process.kill()


def test_what_starts_while_the_guard_looks_ends_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, folder = psutil.process_iter, str(tmp_path / "cluster")

    def start() -> psutil.Popen:
        return psutil.Popen(["sleep", "60"], env={**os.environ, guard.VARIABLE: folder})

    def looked() -> list[psutil.Process]:
        found = list(look())
        if len(started) == 1:
            started.append(start())
        return found

    started = [start()]
    monkeypatch.setattr(psutil, "process_iter", looked)
    monkeypatch.setattr(sys, "argv", ["guard.py", folder, "0"])
    guard.main()
    assert len(started) == 2 and not any(process.is_running() for process in started)


def test_a_block_ends_while_a_fork_of_the_driver_goes_on() -> None:
    seconds, exists, ended = _run(FORKED).stdout.split()
    assert float(seconds) < 30
    assert (exists, ended) == ("False", "0")


@pytest.mark.full
def test_two_starts_listen_on_loopback_and_leave_environment_signals_and_home_as_they_were(
    tmp_path: Path,
) -> None:
    fresh = _run(FRESH, HOME=str(tmp_path))
    assert fresh.returncode == 0, fresh.stderr
    start = ["1", "['127.0.0.1', '::ffff:127.0.0.1']", "True", "False"]
    assert fresh.stdout.splitlines() == [*start, *start, "True"]
    assert list(tmp_path.iterdir()) == []
