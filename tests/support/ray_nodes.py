"""Nodes of Ray that others started, as a named cluster has them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def node(folder: Path, checkout: Path, *options: str, enter: Sequence[str] = ()) -> Iterator[None]:
    """Run Ray, which imports our packages from a checkout, until the block ends.

    ``options`` are those of ``ray start``; the command is put behind ``enter`` to run on a machine.
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


def paths(checkout: Path) -> str:
    """Return where Python finds a checkout's packages, and what tests share."""
    return f"{checkout}:{checkout / 'tests'}:{os.environ.get('PYTHONPATH', '')}"


def head_options(address: str, port: int, cpus: int = 1) -> list[str]:
    own = [f"--node-ip-address={address}", f"--port={port}", f"--num-cpus={cpus}"]
    return ["--head", *own, "--include-dashboard=false"]
