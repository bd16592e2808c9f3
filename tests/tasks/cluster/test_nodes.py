from __future__ import annotations

import re
import shutil
import subprocess
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from support.ray_nodes import head_options, node
from support.servers import free_port
from tasks.cluster.lease import ClusterLease
from tasks.cluster.nodes import ANSWER_SECONDS, code_identity, require_same_code, sources_digest
from tasks.cluster.ray_cluster import CHECKOUT
from umim_core.config.recipe import ClusterConfig
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


@pytest.mark.full
def test_nodes_with_roots_of_their_own_are_refused_in_time_and_nothing_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes have an empty disk where the root lies: they are in mount namespaces."""
    root, address = tmp_path / "root", f"127.0.0.1:{free_port()}"
    root.mkdir()
    apart = (
        "unshare",
        "--mount",
        "sh",
        "-c",
        f"mount -t tmpfs tmpfs '{root}' && exec \"$@\"",
        "sh",
    )
    if subprocess.run([*apart, "true"]).returncode:
        pytest.skip("mount namespaces need root: nodes without a shared disk were not tried")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    head = head_options("127.0.0.1", int(address.rpartition(":")[2]))
    other = (f"--address={address}", "--node-ip-address=127.0.0.1", "--num-cpus=1")
    with ExitStack() as nodes:
        nodes.enter_context(node(tmp_path, CHECKOUT, *head))
        for _ in range(2):
            nodes.enter_context(node(tmp_path, CHECKOUT, *other, enter=apart))
        began, lease = time.monotonic(), ClusterLease(ClusterConfig(address=address), root)
        with pytest.raises(ClusterError, match="must share the artifact root") as refused, lease:
            lease.ensure()
    assert len(re.findall(r"\d+\.\d+\.\d+\.\d+:\d+", str(refused.value))) == 2
    assert time.monotonic() - began < ANSWER_SECONDS + 60  # and what joining and ending takes
    assert [path.name for path in root.rglob("*")] == ["ray-logs"]
