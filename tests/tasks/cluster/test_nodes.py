from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from support.machines import machines
from support.ray_nodes import answer_on, cluster_of
from tasks.cluster.nodes import ANSWER_SECONDS, code_identity, require_same_code, sources_digest
from tasks.cluster.ray_cluster import CHECKOUT
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
    with machines(3, root) as (_, three), cluster_of(three, tmp_path, CHECKOUT) as address:
        first, *others = three
        refusal, seconds, left = answer_on(first, CHECKOUT, DRIVER, address, root, 3)
    assert "must share the artifact root" in refusal
    assert all(other.address in refusal for other in others) and first.address not in refusal
    assert seconds < ANSWER_SECONDS + 30  # and what joining takes
    assert left == ["ray-logs"]
