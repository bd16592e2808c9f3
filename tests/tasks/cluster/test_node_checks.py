"""Nodes of a cluster that others started: other code, and roots of their own, are refused."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.cluster.code_identity import code_identity, sources_digest
from tasks.cluster.lease import ClusterLease
from tasks.cluster.node_checks import ANSWER_SECONDS, require_same_code
from tasks.cluster.ray_cluster import CHECKOUT
from umim_core.config.recipe import ClusterConfig
from umim_core.errors import ClusterError

PACKAGES = ("umim_core", "tasks", "flows")


def copied_checkout(folder: Path) -> Path:
    for name in PACKAGES:
        shutil.copytree(CHECKOUT / name, folder / name, ignore=lambda *_: ["__pycache__"])
    return folder


def test_sources_are_equal_wherever_they_lie_and_differ_by_one_byte(tmp_path: Path) -> None:
    copy = copied_checkout(tmp_path)
    assert sources_digest(copy) == code_identity().sources
    with (copy / "tasks/cluster/lease.py").open("a", encoding="utf-8") as file:
        file.write("\n")
    assert sources_digest(copy) != code_identity().sources


@pytest.mark.parametrize("other", ["sources", "lock"])
def test_a_node_with_other_code_is_named(other: str) -> None:
    ours = code_identity()
    require_same_code({"10.0.0.1": ours, "10.0.0.2": replace(ours, checkout="/srv/umim")})
    theirs = replace(ours, checkout="/srv/old", commit="a" * 40, **{other: "0" * 64})
    with pytest.raises(ClusterError, match="must run the code of the driver") as caught:
        require_same_code({"10.0.0.1": ours, "10.0.0.2": theirs})
    assert f"node 10.0.0.2: other {other}" in str(caught.value)
    assert "/srv/old at aaaaaaaaaaaa" in str(caught.value)


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """A function that starts a Ray of one core in a checkout, behind a command, on loopback."""
    started: list[subprocess.Popen[bytes]] = []

    def start(checkout: Path, *before: str) -> str:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [*before, sys.executable, "-m", "ray.scripts.scripts", "start", "--head"]
        command += ["--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=1", "--block"]
        command += ["--include-dashboard=false", "--object-store-memory=100000000"]
        command += [f"--temp-dir={tmp_path / 'r'}"]
        environment = os.environ | {"PYTHONPATH": str(checkout), "RAY_AUTH_MODE": "disabled"}
        log = (tmp_path / "ray.log").open("wb")
        started.append(
            subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        )
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and "Ray runtime started" not in read(tmp_path):
            time.sleep(0.5)
        return f"127.0.0.1:{port}"

    yield start
    for process in started:
        os.killpg(process.pid, 15)
        process.wait(timeout=60)


def read(folder: Path) -> str:
    return (folder / "ray.log").read_text(encoding="utf-8", errors="replace")


def join(address: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with ClusterLease(ClusterConfig(address=address), root) as lease:
        lease.ensure()


@pytest.mark.full
def test_a_worker_of_another_checkout_is_refused_and_one_of_equal_code_is_not(
    tmp_path: Path, head: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copied_checkout(tmp_path / "copy")
    shutil.copytree(CHECKOUT / "requirements", copy / "requirements")
    address = head(copy)
    join(address, tmp_path / "root", monkeypatch)
    with (copy / "tasks/cluster/lease.py").open("a", encoding="utf-8") as file:
        file.write("\n")
    with pytest.raises(ClusterError, match="must run the code of the driver") as caught:
        join(address, tmp_path / "root", monkeypatch)
    assert str(copy) in str(caught.value)


@pytest.mark.full
def test_a_node_with_a_root_of_its_own_is_refused_in_time_and_nothing_stays(
    tmp_path: Path, head: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    hidden = f"mount -t tmpfs tmpfs '{root}' && exec \"$@\""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces need root: a node without the shared root was not tried")
    address = head(CHECKOUT, "unshare", "--mount", "sh", "-c", hidden, "sh")
    began = time.monotonic()
    with pytest.raises(ClusterError, match="must share the artifact root"):
        join(address, root, monkeypatch)
    assert time.monotonic() - began < ANSWER_SECONDS + 30  # and what joining takes
    assert [path.name for path in root.rglob("*")] == ["ray-logs"]
