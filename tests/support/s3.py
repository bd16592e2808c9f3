"""An S3 server on loopback: moto's, in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

SETTINGS = {
    "AWS_ACCESS_KEY_ID": "key-of-the-test",
    "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
    "AWS_DEFAULT_REGION": "eu-west-1",
}


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Serve an empty bucket ``umim`` until the block ends; the test is skipped without packages.

    Yields:
        Environment by which s3fs finds the server.
    """
    pytest.importorskip("s3fs", reason="object storage needs umim[s3]")
    with _moto() as port:
        settings = SETTINGS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
        _make_bucket(settings, "umim")
        yield settings


def environment(settings: dict[str, str], prefix: str, scratch: str) -> dict[str, str]:
    """Return the environment of a process that works on ``s3://umim/<prefix>``."""
    root = {"UMIM_ROOT": f"s3://umim/{prefix}", "UMIM_SCRATCH": scratch}
    return {**os.environ, **settings, **root}


@contextmanager
def _moto() -> Iterator[int]:
    server = pytest.importorskip("moto.server", reason="the tests of S3 need moto[server]")
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    try:
        yield running.get_host_and_port()[1]
    finally:
        running.stop()


def _make_bucket(settings: dict[str, str], name: str) -> None:
    import s3fs

    filesystem = s3fs.S3FileSystem(
        key=settings["AWS_ACCESS_KEY_ID"],
        secret=settings["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=settings["AWS_ENDPOINT_URL"],
        client_kwargs={"region_name": settings["AWS_DEFAULT_REGION"]},
        skip_instance_cache=True,
    )
    filesystem.mkdir(f"/{name}")
