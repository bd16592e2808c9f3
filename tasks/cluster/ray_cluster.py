"""The only ``ray.init`` of the project: a private loopback cluster, or a named one.

A local cluster listens on 127.0.0.1 alone, asks every caller for a random token, keeps its files
in a private folder that is removed at the end, and gives its workers the import path of this
checkout. What Ray reads from the environment it reads when it is imported, so the environment is
prepared first, and refreshed where another module has imported Ray before.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from tasks.cluster import guard
from tasks.cluster.stopping import FOLDER_PREFIX
from umim_core.checkpoint.checkpoint_index import artifact_root, remote_address
from umim_core.errors import ClusterError

CHECKOUT = Path(__file__).resolve().parents[2]
LOCAL = "local"
RENDEZVOUS_VARIABLE = "UMIM_RENDEZVOUS"
_MIB = 1 << 20
_MIN_OBJECT_STORE = 80 * _MIB
_CONNECT_SECONDS = 5.0
# A Unix socket path holds at most 107 bytes; Ray appends up to 64 to its folder
# ("/session_2026-11-20_14-11-39_942048_1234567/sockets/plasma_store").
_MAX_TEMP_DIR_BYTES = 42
_LOOPBACK = frozenset({"127.0.0.1", "::1", "::ffff:127.0.0.1"})


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster that this process is connected to.

    Attributes:
        address: ``host:port`` of the cluster's control service.
        cpus: CPU cores it offers.
        gpus: GPUs it offers.
        started: Whether this process started the cluster (and stops it).
        logs: Ray's log files of a cluster started here, deleted when it stops; None for others.
        joined: Whether others started it, and this block connected to it.
        shared: Whether all of its nodes see the artifact root of this process.
    """

    address: str
    cpus: int
    gpus: int
    started: bool
    logs: Path | None = None
    joined: bool = False
    shared: bool = True

    def beside_driver(self) -> dict[str, float]:
        """Return the resources that put a task which writes into the artifact root near it.

        Without a shared root it is there on the driver's machine alone.
        """
        if self.shared:
            return {}
        import ray

        here = ray.get_runtime_context().get_node_id()
        [address] = [n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == here]
        return {f"node:{address}": 0.001}


@contextlib.contextmanager
def ray_cluster(
    cpus: int | None = None,
    address: str | None = None,
    *,
    object_store_bytes: int = 1024 * _MIB,
) -> Iterator[Cluster]:
    """Connect to Ray for the length of a ``with`` block.

    Inside another such block (or after the caller's own connection) the existing connection is
    used as it is and is left open.

    Args:
        cpus: Logical CPU cores of a cluster started here; all cores where None.
        address: ``host:port``, ``ray://host:port`` or ``auto`` of a running cluster; "local"
            starts one. None means the environment's ``RAY_ADDRESS``, else "local".
        object_store_bytes: Shared memory of a cluster started here, in bytes.
    """
    _check_arguments(cpus, object_store_bytes)
    import ray

    if ray.is_initialized():
        yield _describe(started=False)
        return
    target = cluster_address(address)
    with contextlib.ExitStack() as stack:
        options: dict[str, object] = {"log_to_driver": False, "logging_level": "ERROR"}
        environment = worker_environment(local=target == LOCAL)
        sockets_before = set(listening_addresses())
        if target == LOCAL:
            folder = stack.enter_context(_cluster_folder())
            environment[RENDEZVOUS_VARIABLE] = str(folder)
            stack.enter_context(_private_environment())
            _refresh_ray_settings()
            options |= {
                "address": LOCAL,
                "num_cpus": cpus,
                "object_store_memory": object_store_bytes,
                "include_dashboard": False,
                "_node_ip_address": "127.0.0.1",
                "_temp_dir": str(folder),
            }
        else:
            _check_reachable(target)
            options["address"] = target
        options["runtime_env"] = {"env_vars": environment}
        stack.callback(ray.shutdown)
        _init(options, target)
        if target == LOCAL:
            require_loopback(set(listening_addresses()) - sockets_before)
        yield _describe(started=target == LOCAL, joined=target != LOCAL)


def cluster_address(address: str | None) -> str:
    """Return where a cluster is joined, by the environment where none is named, or "local"."""
    return address or os.environ.get("RAY_ADDRESS") or LOCAL


def worker_environment(*, local: bool) -> dict[str, str]:
    """Return the environment variables that every worker gets.

    Args:
        local: Whether the workers run on this machine, so that this checkout's path means
            something to them and its accelerators are theirs.

    Returns:
        Names and values. ``OMP_WAIT_POLICY=PASSIVE`` because two spinning thread teams on few
        cores can make a small forward pass thirty times slower.
    """
    env = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "1",
    }
    if local:
        old = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        paths = [str(CHECKOUT), *(p for p in old if p != str(CHECKOUT))]
        env["PYTHONPATH"] = os.pathsep.join(paths)
        # Left alone, gloo and NCCL listen on the interface that the host's name resolves to.
        env["GLOO_SOCKET_IFNAME"] = env["NCCL_SOCKET_IFNAME"] = loopback_interface()
        import torch

        if not torch.cuda.device_count():
            env["DS_ACCELERATOR"] = "cpu"
    elif (stored := remote_address()) is not None:  # a node finds a stage as the driver does
        env |= {"UMIM_ROOT": stored, "UMIM_SCRATCH": str(artifact_root())}
    return env


def _check_arguments(cpus: int | None, object_store_bytes: int) -> None:
    if cpus is not None and cpus < 1:
        raise ClusterError("cpus must be at least 1", cpus)
    if object_store_bytes < _MIN_OBJECT_STORE:
        raise ClusterError(
            f"object_store_bytes must be at least {_MIN_OBJECT_STORE}", object_store_bytes
        )


@contextlib.contextmanager
def _private_environment() -> Iterator[None]:
    """Set what a local cluster needs in this process's environment, then put the old back."""
    wanted = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # every socket on 127.0.0.1
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # so that no token file is written
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_raylet_start_wait_time_s": "180",  # 30 s are too few on a busy machine
        "SPT_NOENV": "1",  # titles leave the environment, by which the guard finds processes
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _refresh_ray_settings() -> None:
    """Make an imported Ray see the environment prepared for it.

    Ray 2.60 copies the switch for loopback into a constant, and the authentication mode into a
    native table, at import; the token is cached at first use. The three lines below are what Ray
    runs itself when it turns token authentication on late. ``require_loopback`` checks the result.
    """
    from ray import _raylet
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False
    _raylet.Config.initialize("")
    _raylet.AuthenticationTokenLoader.instance().reset_cache()


def _check_reachable(target: str) -> None:
    """Refuse a cluster that is away, or one used without a decision on authentication."""
    if "RAY_AUTH_MODE" not in os.environ:
        raise ClusterError(
            "a cluster on the network needs an explicit RAY_AUTH_MODE",
            target,
            "Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH).",
        )
    if target == "auto":
        return
    host, _, port = target.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ClusterError("a cluster address must be host:port, ray://host:port or auto", target)
    # Ray itself waits two minutes for an address that does not answer and then ends the process.
    error = _refusal(host, int(port))
    if error is not None:
        raise ClusterError(
            "the Ray cluster must answer", f"{target} ({error})", "Start it or correct the address."
        ) from error


def _refusal(host: str, port: int) -> OSError | None:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        return error
    return None


def _init(options: dict[str, object], target: str) -> None:
    import ray

    main_thread = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if main_thread else None
    try:
        with StartErrors(target):
            ray.init(**options)
    finally:
        # ray.init takes over SIGTERM; whoever handled it before (Prefect does) keeps it.
        if main_thread and callable(before):
            signal.signal(signal.SIGTERM, before)


class StartErrors(contextlib.AbstractContextManager[None]):
    """Raise what ``ray.init`` does as a ClusterError, bare ``Exception`` too.

    Ray has no type for a node that is not up after the 30 seconds of its own, which cannot be
    changed; a type derived from Exception that is not listed stays what it is.
    """

    def __init__(self, target: str) -> None:
        self._target = target

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        from ray.exceptions import RayError

        listed = (OSError, RuntimeError, ValueError, AssertionError, RayError)
        if kind is Exception or isinstance(error, listed):
            late = kind is Exception and "timed out" in str(error)
            remedy = "Run the same command again when the machine is less busy." if late else ""
            raise ClusterError("Ray must start", f"{self._target}: {error}", remedy) from error


def _describe(*, started: bool, joined: bool = False) -> Cluster:
    import ray

    resources = ray.cluster_resources()
    return Cluster(
        address=ray.get_runtime_context().gcs_address,
        cpus=int(resources.get("CPU", 0)),
        gpus=int(resources.get("GPU", 0)),
        started=started,
        logs=Path(ray._private.worker._global_node.get_logs_dir_path()) if started else None,
        joined=joined,
    )


def is_alive(cluster: Cluster) -> bool:
    """Tell, in a few seconds at most, whether a cluster that was connected to can still be used."""
    import ray

    if not ray.is_initialized():
        return False
    if cluster.started:
        dead = {kind for kind, _ in ray._private.worker._global_node.dead_processes()}
        if dead & {"raylet", "gcs_server"}:
            return False
    host, _, port = cluster.address.rpartition(":")
    return _refusal(host, int(port)) is None


def abandon() -> None:
    """Kill what is left of a private cluster, for a shutdown would wait for what is dead."""
    import ray

    node = ray._private.worker._global_node
    if node is not None:
        node.kill_all_processes(check_alive=False, allow_graceful=False)


@contextlib.contextmanager
def _cluster_folder() -> Iterator[Path]:
    """Give a short private folder, and sweep those that killed processes left behind."""
    base = Path(tempfile.gettempdir())
    if len(str(base).encode()) + len(f"/{FOLDER_PREFIX}4194304-12345678") > _MAX_TEMP_DIR_BYTES:
        base = Path("/tmp")  # noqa: S108  the only short name; mkdtemp makes the folder private
    for old in base.glob(f"{FOLDER_PREFIX}*-*"):
        with contextlib.suppress(ValueError, FileNotFoundError):
            pid = int(old.name.split("-")[2])
            if old.stat().st_uid == os.getuid() and not psutil.pid_exists(pid):
                shutil.rmtree(old, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir=base))
    try:
        yield path
    finally:
        _end_processes(path)
        shutil.rmtree(path, ignore_errors=True)


def _end_processes(folder: Path) -> None:
    """Kill this process's children that name a folder: Ray leaves those of a start that failed."""
    left = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it is gone, or another user's
            if any(str(folder) in word for word in process.cmdline()):
                left.append(process)
    guard.kill(left)


def listening_addresses() -> list[tuple[str, str, int]]:
    """List the listening TCP sockets of this process and of all its descendants.

    Returns:
        (process name, address, port) per socket, sorted.
    """
    me = psutil.Process()
    addresses: set[tuple[str, str, int]] = set()
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            for connection in process.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN:
                    addresses.add((process.name(), connection.laddr.ip, connection.laddr.port))
    return sorted(addresses)


def require_loopback(sockets: Iterable[tuple[str, str, int]]) -> None:
    """Check that sockets listen on this machine only."""
    reachable = [f"{name} on {ip}:{port}" for name, ip, port in sockets if ip not in _LOOPBACK]
    if reachable:
        raise ClusterError(
            "a local Ray cluster must listen on 127.0.0.1 only",
            ", ".join(sorted(reachable)),
            "Check that the installed Ray is the pinned version.",
        )


def loopback_interface() -> str:
    """Return the name of the interface that holds 127.0.0.1 ("lo" on Linux, "lo0" on macOS)."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == "127.0.0.1" for a in addresses):
            return name
    raise ClusterError("the machine must have a loopback interface with address 127.0.0.1")
