"""Nodes of Ray that others started, as a named cluster has them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from support.machines import Machine
from support.processes import output_of


@contextmanager
def node(folder: Path, checkout: Path, *options: str, enter: Sequence[str] = ()) -> Iterator[None]:
    """Run Ray, from a checkout, until the block ends.

    Args:
        folder: Receives its log.
        checkout: Where it imports our packages from.
        options: Of ``ray start``: addresses and resources.
        enter: What the command is put behind to run on a machine.
    """
    log = folder / f"ray-{len(list(folder.glob('ray-*')))}.log"
    command = [*enter, sys.executable, "-m", "ray.scripts.scripts", "start", *options, "--block"]
    command += ["--object-store-memory=100000000"]
    environment = os.environ | {"PYTHONPATH": paths(checkout), "RAY_AUTH_MODE": "disabled"}
    environment["RAY_raylet_start_wait_time_s"] = "180"  # 30 s are too few on a busy machine
    with (
        tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as short,  # sockets lie in it
        log.open("wb") as stream,
        subprocess.Popen(
            [*command, *([f"--temp-dir={short}"] if "--head" in options else [])],
            env=environment,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        ) as process,
    ):
        try:
            while process.poll() is None and "Ray runtime started" not in log.read_text("utf-8"):
                time.sleep(0.2)
            assert process.poll() is None, log.read_text("utf-8")
            yield
        finally:
            os.killpg(process.pid, signal.SIGTERM)


@contextmanager
def cluster_of(machines: Sequence[Machine], folder: Path, checkout: Path) -> Iterator[str]:
    """Run Ray on machines, with a core each, until the block ends; give the first one's address."""
    first, *others = machines
    address = f"{first.address}:6379"
    with ExitStack() as stack:
        head = head_options(first.address, 6379)
        stack.enter_context(node(folder, checkout, *head, enter=first.enter))
        for other in others:
            own = (f"--address={address}", f"--node-ip-address={other.address}", "--num-cpus=1")
            stack.enter_context(node(folder, checkout, *own, enter=other.enter))
        yield address


def answer_on(
    machine: Machine, checkout: Path, program: str, *arguments: object, **environment: str
) -> Any:
    """Run a program on a machine of a cluster; return what its line "answer" holds."""
    environment |= {"PYTHONPATH": paths(checkout), "RAY_AUTH_MODE": "disabled"}
    command = [*machine.enter, sys.executable, "-c", program, *arguments]
    printed = output_of(*command, cwd=checkout, seconds=1800, **environment)
    (line,) = [line for line in printed.splitlines() if line.startswith("answer ")]
    return json.loads(line.removeprefix("answer "))


def paths(checkout: Path) -> str:
    """Return where Python finds a checkout's packages, and what tests share."""
    return os.pathsep.join(
        [str(checkout), str(checkout / "tests"), os.environ.get("PYTHONPATH", "")]
    )


def head_options(address: str, port: int, cpus: int = 1) -> list[str]:
    own = [f"--node-ip-address={address}", f"--port={port}", f"--num-cpus={cpus}"]
    return ["--head", *own, "--include-dashboard=false"]
