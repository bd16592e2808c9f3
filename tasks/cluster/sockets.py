"""Listening sockets of this process and its descendants, and whether others can reach them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil

from umim_core.errors import ClusterError

_LOOPBACK = frozenset({"127.0.0.1", "::1", "::ffff:127.0.0.1"})


def listening_addresses() -> list[tuple[str, str, int]]:
    """List the listening TCP sockets of this process and of all its descendants.

    Returns:
        (process name, address, port) per socket, sorted.
    """
    me = psutil.Process()
    found: set[tuple[str, str, int]] = set()
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            for connection in process.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((process.name(), connection.laddr.ip, connection.laddr.port))
    return sorted(found)


def require_loopback(sockets: Iterable[tuple[str, str, int]]) -> None:
    """Check that sockets listen on this machine only.

    Args:
        sockets: Entries of ``listening_addresses``.

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
