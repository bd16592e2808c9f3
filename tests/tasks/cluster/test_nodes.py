from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from support.processes import output_of
from support.ray_nodes import head_options, node, paths
from tasks.cluster.nodes import ANSWER_SECONDS, code_identity, require_same_code, sources_digest
from tasks.cluster.ray_cluster import CHECKOUT
from umim_core.errors import ClusterError


def test_sources_are_equal_wherever_they_lie_and_differ_by_one_byte(tmp_path: Path) -> None:
    for name in ("umim_core", "tasks", "flows"):
        shutil.copytree(CHECKOUT / name, tmp_path / name, ignore=lambda *_: ["__pycache__"])
    assert sources_digest(tmp_path) == code_identity().sources
    with (tmp_path / "tasks/cluster/lease.py").open("a", encoding="utf-8") as file:
        file.write("\n")
    assert sources_digest(tmp_path) != code_identity().sources


@pytest.mark.parametrize("other", ["sources", "lock"])
def test_a_node_with_other_code_is_named(other: str) -> None:
    ours = code_identity()
    require_same_code({"10.0.0.1": ours, "10.0.0.2": replace(ours, checkout="/srv/umim")})
    theirs = replace(ours, checkout="/srv/old", commit="a" * 40, **{other: "0" * 64})
    with pytest.raises(ClusterError, match="must run the code of the driver") as caught:
        require_same_code({"10.0.0.1": ours, "10.0.0.2": theirs})
    assert f"node 10.0.0.2: other {other}" in str(caught.value)
    assert "/srv/old at aaaaaaaaaaaa" in str(caught.value)


# A process that keeps the namespaces of a machine.
HOLD = 'hostname "$1" && mount -t tmpfs tmpfs "$2" && echo ready && exec sleep infinity'


class Machine(NamedTuple):
    address: str  # its own on the bridge
    enter: tuple[str, ...]  # what a command is put behind to run on it


@contextmanager
def machines(count: int, private: Path) -> Iterator[list[Machine]]:
    """Keep machines on one bridge, which have no disk in common, until the block ends.

    They are namespaces of this machine, which only root may make: network, mount and host name.
    ``private`` is a folder that is another, empty one on each of them.
    """
    bridge, network = f"umim{os.getpid()}", f"10.77.{os.getpid() % 250}"
    with ExitStack() as stack:
        if subprocess.run(["ip", "link", "add", bridge, "type", "bridge"]).returncode:
            pytest.skip("network namespaces need root: machines without a shared disk not tried")
        stack.callback(ip, f"link delete {bridge}")
        ip(f"address add {network}.1/24 dev {bridge}")
        ip(f"link set {bridge} up")
        private.mkdir(exist_ok=True)
        found = []
        for index in range(count):
            unshare = ["unshare", "--net", "--mount", "--uts", "sh", "-c", HOLD, "sh"]
            holder = subprocess.Popen(
                [*unshare, f"machine-{index}", str(private)], stdout=subprocess.PIPE
            )
            stack.enter_context(holder)
            stack.callback(holder.kill)
            assert holder.stdout is not None and holder.stdout.readline() == b"ready\n"
            enter = ("nsenter", f"--target={holder.pid}", "--net", "--mount", "--uts")
            cable, address = f"um{os.getpid()}-{index}", f"{network}.{11 + index}"
            ip(f"link add {cable} type veth peer eth0 netns {holder.pid}")
            ip(f"link set {cable} master {bridge} up")
            for step in (
                f"address add {address}/24 dev eth0",
                "link set eth0 up",
                "link set lo up",
            ):
                ip(step, *enter)
            found.append(Machine(address, enter))
        yield found


def ip(step: str, *enter: str) -> None:
    subprocess.run([*enter, "ip", *step.split()], check=True)


# Joins a cluster when it has so many nodes; prints the refusal, the seconds, and what lies below.
DRIVER = """
import json, sys, time
from pathlib import Path
import ray
from tasks.cluster.lease import ClusterLease
from umim_core.config.recipe import ClusterConfig
from umim_core.errors import ClusterError

address, root, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
ray.init(address, logging_level="ERROR")
while sum(node["Alive"] for node in ray.nodes()) < count:
    time.sleep(0.2)
ray.shutdown()
began, refusal = time.monotonic(), ""
try:
    with ClusterLease(ClusterConfig(address=address), root) as lease:
        lease.ensure()
except ClusterError as error:
    refusal = str(error)
left = [str(path.relative_to(root)) for path in root.rglob("*")]
print("answer", json.dumps([refusal, time.monotonic() - began, left]))
"""


@pytest.mark.full
def test_nodes_with_roots_of_their_own_are_refused_in_time_and_nothing_is_published(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    with machines(3, root) as (first, *others), ExitStack() as nodes:
        address = f"{first.address}:6379"
        head = head_options(first.address, 6379)
        nodes.enter_context(node(tmp_path, CHECKOUT, *head, enter=first.enter))
        for other in others:
            own = (f"--address={address}", f"--node-ip-address={other.address}", "--num-cpus=1")
            nodes.enter_context(node(tmp_path, CHECKOUT, *own, enter=other.enter))
        command = [*first.enter, sys.executable, "-c", DRIVER, address, root, 3]
        environment = {"PYTHONPATH": paths(CHECKOUT), "RAY_AUTH_MODE": "disabled"}
        printed = output_of(*command, cwd=CHECKOUT, seconds=1800, **environment)
    refusal, seconds, left = json.loads(printed.rpartition("answer ")[2])
    assert "must share the artifact root" in refusal
    assert all(other.address in refusal for other in others) and first.address not in refusal
    assert seconds < ANSWER_SECONDS + 30  # and what joining takes
    assert left == ["ray-logs"]
