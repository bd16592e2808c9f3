"""Privacy of a local Ray cluster: a short folder of its own, sockets on the loopback interface."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from tasks.cluster import guard
from tasks.cluster.stopping import FOLDER_PREFIX
from umim_core.errors import ClusterError

# A Unix socket path holds at most 107 bytes; Ray appends up to 64 to its folder
# ("/session_2026-11-20_14-11-39_942048_1234567/sockets/plasma_store").
_MAX_TEMP_DIR_BYTES = 42
_LOOPBACK = frozenset({"127.0.0.1", "::1", "::ffff:127.0.0.1"})


@contextlib.contextmanager
def cluster_folder() -> Iterator[Path]:
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
        with contextlib.suppress(psutil.NoSuchProcess):
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
    """Check that sockets listen on this machine only.

    Raises:
        ClusterError: If one can be reached from another machine.
    """
    reachable = [f"{name} on {ip}:{port}" for name, ip, port in sockets if ip not in _LOOPBACK]
    if reachable:
        raise ClusterError(
            "a local Ray cluster must listen on 127.0.0.1 only",
            ", ".join(sorted(reachable)),
            "Check that the installed Ray is the pinned version.",
        )


def loopback_interface() -> str:
    """Return the name of the interface that holds 127.0.0.1 ("lo" on Linux, "lo0" on macOS).

    Raises:
        ClusterError: If there is none.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == "127.0.0.1" for a in addresses):
            return name
    raise ClusterError("the machine must have a loopback interface with address 127.0.0.1")
