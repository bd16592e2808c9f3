"""Machines on one bridge: network, mount and host name of their own, and no disk that they share.

They are namespaces of this machine, which only root may make: without it the test is skipped.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

_HOLD: Final = 'hostname "$1" && mount -t tmpfs tmpfs "$2" && echo ready && exec sleep infinity'


@dataclass(frozen=True)
class Machine:
    """A machine.

    Attributes:
        address: Its own on the bridge.
        enter: What a command is put behind to run on it.
    """

    address: str
    enter: tuple[str, ...]


@contextmanager
def machines(count: int, private: Path) -> Iterator[tuple[str, list[Machine]]]:
    """Keep machines until the block ends.

    Args:
        count: How many.
        private: A folder that is another, empty one on each of them.

    Yields:
        The address of this machine on the bridge, and the others.
    """
    number = os.getpid() % 250
    bridge, network = f"umim{os.getpid()}", f"10.77.{number}"
    with ExitStack() as stack:
        if subprocess.run(["ip", "link", "add", bridge, "type", "bridge"]).returncode:
            pytest.skip("network namespaces need root: machines without a shared disk not tried")
        stack.callback(_ip, "link", "delete", bridge)
        _ip("address", "add", f"{network}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        private.mkdir(exist_ok=True)
        others = []
        for index in range(count):
            machine = stack.enter_context(_holder(f"machine-{index}", private))
            enter = ("nsenter", f"--target={machine.pid}", "--net", "--mount", "--uts")
            cable, address = f"um{os.getpid()}-{index}", f"{network}.{11 + index}"
            _ip("link", "add", cable, "type", "veth", "peer", "eth0", "netns", str(machine.pid))
            _ip("link", "set", cable, "master", bridge, "up")
            for step in (
                f"address add {address}/24 dev eth0",
                "link set eth0 up",
                "link set lo up",
            ):
                subprocess.run([*enter, "ip", *step.split()], check=True)
            others.append(Machine(address, enter))
        yield f"{network}.1", others


@contextmanager
def _holder(name: str, private: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that keeps the namespaces of a machine."""
    command = ["unshare", "--net", "--mount", "--uts", "sh", "-c", _HOLD, "sh", name, str(private)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
