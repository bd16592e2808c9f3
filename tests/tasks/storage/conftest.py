"""Storage of these tests: servers of S3, and machines that have nothing else in common."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.s3 import Machine, environment, forget_servers, s3_server
from tasks.storage.remote_root import RemoteRoot, remote_root


@pytest.fixture(scope="module", params=["moto", pytest.param("seaweedfs", marks=pytest.mark.full)])
def server(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    with s3_server(request.param) as settings:
        forget_servers()
        yield settings
        forget_servers()


@pytest.fixture
def machine(server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Make this process a machine with a scratch folder of its own, on one storage a test."""

    def become(name: str) -> RemoteRoot:
        wanted = environment(server, tmp_path.name, str(tmp_path / name))
        for key in (*server, "UMIM_ROOT", "UMIM_SCRATCH"):
            monkeypatch.setenv(key, wanted[key])
        remote = remote_root()
        assert remote is not None
        return remote

    return become
