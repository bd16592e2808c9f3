"""The only ``ray.init`` of the project: a private loopback cluster, or a named one.

A local cluster listens on 127.0.0.1 alone, asks every caller for a random token, ends with this
process, keeps its files in a private folder that is then removed, and gives its workers the import
path of this checkout. What Ray reads from the environment it reads when it is imported, so the
environment is prepared first, and refreshed where another module has imported Ray before.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import psutil

from tasks.cluster import guard
from umim_core.checkpoint.checkpoint_index import artifact_root, remote_address
from umim_core.errors import ClusterError, require

CHECKOUT = Path(__file__).resolve().parents[2]
LOCAL = "local"
NO_TELEMETRY: Final = {  # of Prefect, MLflow and Ray, in the environment of all that we start
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_FOLDER_PREFIX: Final = "umim-ray-"
_MIB = 1 << 20
_MIN_OBJECT_STORE = 80 * _MIB
_CONNECT_SECONDS = 5.0
_SIGACTION_BYTES = 512  # more than the structure has anywhere
# A Unix socket path holds at most 107 bytes; Ray appends up to 64 to its folder
# ("/session_2026-11-20_14-11-39_942048_1234567/sockets/plasma_store").
_MAX_TEMP_DIR_BYTES = 42
_LOOPBACK = frozenset({"127.0.0.1", "::1", "::ffff:127.0.0.1"})


@dataclass(frozen=True)
class Cluster:
    address: str  # ``host:port`` of its control service
    cpus: int
    gpus: int
    logs: Path | None = None  # Ray's of a cluster started here, deleted when it stops
    joined: bool = False  # whether others started it, and this block connected to it

    @property
    def is_here(self) -> bool:
        """Whether it is of this machine alone, so that its size stays."""
        return self.address.startswith("127.0.0.1:")


@contextlib.contextmanager
def ray_cluster(
    cpus: int | None = None, address: str | None = None, *, object_store_bytes: int = 1024 * _MIB
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
    require(cpus is None or cpus >= 1, ClusterError, "cpus must be at least 1", cpus)
    rule = f"object_store_bytes must be at least {_MIN_OBJECT_STORE}"
    require(object_store_bytes >= _MIN_OBJECT_STORE, ClusterError, rule, object_store_bytes)
    import ray

    if ray.is_initialized():
        yield _describe()
        return
    target = cluster_address(address)
    with contextlib.ExitStack() as stack:
        options: dict[str, object] = {"log_to_driver": False, "logging_level": "ERROR"}
        sockets_before = set(listening_addresses())
        own: dict[str, str] = {}  # of what Ray starts, and not of what else this process starts
        if target == LOCAL:
            folder = stack.enter_context(_guarded_folder())
            stack.enter_context(_environment(_private_settings()))
            # Workers inherit it: a runtime_env would start Python twice for each of them.
            own = {guard.VARIABLE: str(folder), **worker_environment(local=True)}
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
            options["runtime_env"] = {"env_vars": worker_environment(local=False)}
        # A thread of its own: the kernel ends Ray's processes with the thread that started them,
        # and in the main one Ray would take over SIGTERM.
        starter = stack.enter_context(ThreadPoolExecutor(1, "ray"))
        stack.callback(ray.shutdown)
        with _environment(own), _end_by_term_kept():
            require_started(starter.submit(ray.init, **options).exception(), target)
        if target != LOCAL:
            yield replace(_describe(), joined=True)
            return
        require_loopback(set(listening_addresses()) - sockets_before)
        yield replace(_describe(), logs=Path(ray._private.worker._global_node.get_logs_dir_path()))


def cluster_address(address: str | None) -> str:
    """Return where a cluster is joined, by the environment where none is named, or "local"."""
    return address or os.environ.get("RAY_ADDRESS") or LOCAL


def worker_environment(*, local: bool) -> dict[str, str]:
    """Return the environment variables that every worker gets.

    ``local`` workers run on this machine: its paths and accelerators are theirs.
    """
    env = {
        "OMP_WAIT_POLICY": "PASSIVE",  # two spinning teams on few cores can be 30 times slower
        "TOKENIZERS_PARALLELISM": "false",
        **NO_TELEMETRY,
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


def _private_settings() -> dict[str, str]:
    return {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # every socket on 127.0.0.1
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # so that no token file is written
        "RAY_DEDUP_LOGS": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_raylet_start_wait_time_s": "180",  # 30 s are too few on a busy machine
        "RAY_prestart_worker_first_driver": "0",  # a worker per core, wanted or not
        "SPT_NOENV": "1",  # titles leave the environment, by which the guard finds processes
    }


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process's environment for the block, then put the old back."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _end_by_term_kept() -> Iterator[None]:
    """Put back what SIGTERM does, as C code has it: Ray's handler first prints a stack trace.

    Ray starts in other threads, too, where Python sets no handler.
    """
    libc, kept = ctypes.CDLL(None), ctypes.create_string_buffer(_SIGACTION_BYTES)
    libc.sigaction(signal.SIGTERM, None, kept)
    try:
        yield
    finally:
        libc.sigaction(signal.SIGTERM, kept, None)


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
    rule = "a cluster on the network needs an explicit RAY_AUTH_MODE"
    remedy = "Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH)."
    require("RAY_AUTH_MODE" in os.environ, ClusterError, rule, target, remedy)
    if target == "auto":
        return
    host, _, port = target.removeprefix("ray://").rpartition(":")
    rule = "a cluster address must be host:port, ray://host:port or auto"
    require(bool(host) and port.isdigit(), ClusterError, rule, target)
    # Ray itself waits two minutes for an address that does not answer and then ends the process.
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise ClusterError(
            "the Ray cluster must answer", f"{target} ({error})", "Start it or correct the address."
        ) from error


def require_started(error: BaseException | None, target: str) -> None:
    """Raise whatever ``ray.init`` raised as a ClusterError.

    Ray has no type for a node that is not up after the 30 seconds of its own.
    """
    if isinstance(error, Exception):
        late = type(error) is Exception and "timed out" in str(error)
        remedy = "Run the same command again when the machine is less busy." if late else ""
        raise ClusterError("Ray must start", f"{target}: {error}", remedy) from error
    if error is not None:
        raise error


def _describe() -> Cluster:
    import ray

    offered = ray.cluster_resources()
    return Cluster(
        address=ray.get_runtime_context().gcs_address,
        cpus=int(offered.get("CPU", 0)),
        gpus=int(offered.get("GPU", 0)),
    )


@contextlib.contextmanager
def _guarded_folder() -> Iterator[Path]:
    """Give a short private folder; its guard removes it, and ends what Ray left, when we end."""
    base = Path(tempfile.gettempdir())
    if len(f"{base}/{_FOLDER_PREFIX}12345678".encode()) > _MAX_TEMP_DIR_BYTES:
        base = Path("/tmp")  # noqa: S108  the only short name; mkdtemp makes the folder private
    folder = tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=base)
    # A session of its own: it gets no Ctrl-C, and no TERM to this process's group.
    command = [sys.executable, "-P", guard.__file__, folder, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:  # noqa: S603  no argument is anybody's input
        try:
            yield Path(folder)
        finally:
            process.communicate(b"\n")  # its end alone is not seen while a fork keeps the pipe


def listening_addresses() -> list[tuple[str, str, int]]:
    """Return (name, address, port) of TCP sockets of this process and its descendants, sorted."""
    me = psutil.Process()
    addresses: set[tuple[str, str, int]] = set()
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            for socket_ in process.net_connections(kind="tcp"):
                if socket_.status == psutil.CONN_LISTEN:
                    addresses.add((process.name(), *socket_.laddr))
    return sorted(addresses)


def require_loopback(sockets: Iterable[tuple[str, str, int]]) -> None:
    reachable = [f"{name} on {ip}:{port}" for name, ip, port in sockets if ip not in _LOOPBACK]
    rule, found = "a local Ray cluster must listen on 127.0.0.1 only", ", ".join(sorted(reachable))
    remedy = "Check that the installed Ray is the pinned version."
    require(not reachable, ClusterError, rule, found, remedy)


def loopback_interface() -> str:
    """Return the name of the interface that holds 127.0.0.1 ("lo" on Linux, "lo0" on macOS)."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == "127.0.0.1" for a in addresses):
            return name
    raise ClusterError("the machine must have a loopback interface with address 127.0.0.1")
