from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from transformers import PreTrainedTokenizerBase

import tasks.stages.mine
from support.kills import WorkerKiller, titles
from support.processes import ROOT, output_of
from support.tiny_mining import InProcess, NoCluster, TinyCorpus
from tasks.cluster.lease import ClusterLease
from tasks.run.stage import Artifact
from umim_core.config.recipe import ClusterConfig
from umim_core.errors import ClusterError

MANY_TASKS = {"block_tokens": 1000}  # twenty tasks per order for 20,000 tokens
# Titles that Ray gives its workers: what they run now.
MAP, GROUPS = "ray::MapBatches(local)", "ray::MapBatches(total)"
SORT, REDUCE = "ray::map", "ray::reduce"
SHUFFLE = (SORT, REDUCE)  # tasks of milliseconds each: either will do


@pytest.fixture(scope="module")
def lease(two_cores: None) -> Iterator[ClusterLease]:
    with ClusterLease(ClusterConfig(cpus=2, workers=0)) as found:
        found.ensure()
        yield found


@pytest.fixture(scope="module")
def corpus(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerBase
) -> TinyCorpus:
    return TinyCorpus.make(tmp_path_factory.mktemp("corpus"), tiny_tokenizer, 20_007)


@pytest.fixture(scope="module")
def undisturbed(
    corpus: TinyCorpus, lease: ClusterLease, tmp_path_factory: pytest.TempPathFactory
) -> Artifact:
    return corpus.count(tmp_path_factory.mktemp("undisturbed"), lease, **MANY_TASKS)


# Nodes, while no other cluster runs

# Starts three nodes, counts, and removes the second node once it runs what is asked for.
NODES_PROGRAM = """
import json, sys, threading
from pathlib import Path
import psutil
from ray.cluster_utils import Cluster
from tasks.cluster.lease import ClusterLease
from tasks.run.stage import Artifact, Site
from support.kills import titles
from support.tiny_mining import TinyCorpus
from umim_core.config.recipe import ClusterConfig
from umim_core.errors import ClusterError

root, folder, tokenized, backbone, doing, graceful = json.loads(sys.argv[1])
settings = dict(
    num_cpus=1, object_store_memory=100 << 20, node_ip_address="127.0.0.1", temp_dir=folder,
    include_dashboard=False,
)
cluster = Cluster(initialize_head=True, head_node_args=settings)
del settings["include_dashboard"]
second, third = (cluster.add_node(**settings) for _ in range(2))
raylet = psutil.Process(second.all_processes["raylet"][0].process.pid)
over = threading.Event()

def watch():
    while not over.wait(0.003):
        for title in titles(raylet).values():
            if title.startswith(doing):
                print("removed", title, flush=True)
                cluster.remove_node(second, allow_graceful=graceful)
                return

artifact = Artifact(**tokenized | {"path": Path(tokenized["path"])})
corpus = TinyCorpus(None, artifact, backbone)
with ClusterLease(ClusterConfig(address=cluster.address)) as lease:
    assert lease.ensure().cpus == 3
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        print("digest", corpus.count(Path(root), lease, block_tokens=1000).digest)
    except ClusterError as error:
        print("refused", error)
    finally:
        over.set()
        watcher.join()
cluster.shutdown()
"""


@pytest.mark.full
@pytest.mark.parametrize("graceful", [False, True])
@pytest.mark.parametrize(
    "doing", ["ray::MapBatches(local)", "ray::map", "ray::reduce", "ray::MapBatches(total)"]
)
def test_a_removed_node_changes_no_digest(
    corpus: TinyCorpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    doing: str,
    graceful: bool,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tasks.stages.mine, "ClusterCounter", InProcess)
        want = corpus.count(tmp_path / "undisturbed", NoCluster()).digest
    root, inputs = tmp_path / "root", asdict(corpus.tokenized)
    environment = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback only
    }
    with tempfile.TemporaryDirectory(prefix="umim-", dir="/tmp", ignore_cleanup_errors=True) as at:
        environment["RAY_TMPDIR"] = at  # for the file that names the newest cluster
        (Path(at) / "ray").mkdir()
        arguments = [str(root), at, inputs, corpus.backbone, doing, graceful]
        command = [sys.executable, "-c", NODES_PROGRAM, json.dumps(arguments, default=str)]
        printed = output_of(*command, seconds=240, without=("RAY_",), **environment)
    # Ray's own lines come in between.
    removed, outcome = re.findall("^(?:removed|digest|refused).*", printed, re.MULTILINE)
    assert removed.startswith(f"removed {doing}"), "the node was doing it"
    assert outcome == f"digest {want}" or outcome.startswith("refused the workers that count must")
    if outcome.startswith("refused"):
        assert not list(root.glob("count/*/manifest.json"))


# Workers


@pytest.mark.full
@pytest.mark.parametrize(
    ("doing", "seed"),
    [
        (doing, seed)
        for doing in (MAP, SORT, REDUCE, GROUPS, "ray::_")  # the last: also Ray Data's actors
        for seed in range(3)
    ],
)
def test_killed_workers_leave_the_digest_alone(
    corpus: TinyCorpus,
    lease: ClusterLease,
    undisturbed: Artifact,
    tmp_path: Path,
    doing: str,
    seed: int,
) -> None:
    with WorkerKiller(doing, times=2, seed=seed, pause=0.3) as killer:
        counted = corpus.count(tmp_path, lease, **MANY_TASKS)
    assert killer.killed, f"no worker was killed: {doing} {seed}"
    assert counted.digest == undisturbed.digest, (doing, seed, killer.killed)


@pytest.mark.full
def test_workers_that_always_die_end_in_a_typed_error(
    corpus: TinyCorpus, lease: ClusterLease, tmp_path: Path
) -> None:
    with (
        WorkerKiller(MAP, times=10_000) as killer,
        pytest.raises(ClusterError, match="the workers that count must stay alive; got "),
    ):
        corpus.count(tmp_path, lease, **MANY_TASKS)
    assert len(killer.killed) > 3
    assert not list(tmp_path.glob("count/*/manifest.json"))


# The driver

PROGRAM = """
import json, sys
from pathlib import Path
from support.kills import die_at
from support.tiny_mining import TinyCorpus
from tasks.cluster.lease import ClusterLease
from tasks.run.stage import Artifact
from umim_core.config.recipe import ClusterConfig

root, tokenized, backbone, changes, point = json.loads(sys.argv[1])
if point is not None:
    die_at(*point)
corpus = TinyCorpus(None, Artifact(**tokenized | {"path": Path(tokenized["path"])}), backbone)
with ClusterLease(ClusterConfig(cpus=2, workers=0)) as lease:
    corpus.count(Path(root), lease, **changes)
"""
Point = tuple[str, int, str]
# Where the driver kills itself, or what a worker must be doing (and the orders finished by then)
# when the driver is killed; and the orders that are counted again.
POINTS: dict[str, tuple[Point | tuple[str | tuple[str, ...], int], list[int]]] = {
    "map of order 2": ((MAP, 0), [2, 3, 4]),
    "order 2 kept": (("tasks.stages.mine._kept_order", 1, "after"), [3, 4]),
    "map of order 3": ((MAP, 1), [3, 4]),
    "shuffle of order 3": ((SHUFFLE, 1), [3, 4]),
    "groups of order 3": ((GROUPS, 1), [3, 4]),
    "order 3 not renamed": (("umim_core.store.publication.flush_tree", 3, "after"), [3, 4]),
    "all orders kept": (("tasks.stages.mine.save_orders", 4, "before"), []),
    "no manifest": (("umim_core.store.publication.write_manifest", 4, "before"), []),
    "not renamed": (("umim_core.store.publication.flush_tree", 5, "after"), []),
    "renamed": (("umim_core.store.publication.flush", 5, "before"), []),
}


def run_until_killed(
    command: list[str], log: Path, ready: Callable[[str], bool], pause: float
) -> dict[psutil.Process, str]:
    """Run a driver that kills itself, or is killed here once a worker's title is ``ready``.

    Returns:
        The processes that it had started, and what they called themselves last.
    """
    started: dict[psutil.Process, str] = {}
    with log.open("w") as stream:
        driver = psutil.Popen(
            command,
            env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
            stdout=stream,
            stderr=stream,
        )
        deadline = time.monotonic() + 240
        while driver.poll() is None:
            assert time.monotonic() < deadline, log.read_text()
            with contextlib.suppress(psutil.NoSuchProcess):
                found = titles(driver)
                started |= found
                if any(ready(title) for title in found.values()):
                    driver.kill()
            time.sleep(pause)
    assert driver.wait() == -signal.SIGKILL, log.read_text()
    return started


@pytest.mark.full
@pytest.mark.parametrize("name", POINTS)
def test_a_killed_driver_counts_no_finished_order_again(
    corpus: TinyCorpus,
    lease: ClusterLease,
    undisturbed: Artifact,
    tmp_path: Path,
    saved: list[int],
    name: str,
) -> None:
    place, again = POINTS[name]
    root = tmp_path / "root"
    inputs = json.loads(json.dumps(asdict(corpus.tokenized), default=str))
    point = place if len(place) == 3 else None

    def ready(title: str) -> bool:
        if point is not None:
            return False
        finished = list(root.glob("count/*.partial/whole/state/order-?/manifest.json"))
        return title.startswith(place[0]) and len(finished) == place[1]

    arguments = json.dumps([str(root), inputs, corpus.backbone, MANY_TASKS, point])
    command = [sys.executable, "-c", PROGRAM, arguments]
    pause = 0.2 if point else 0.01  # looking for a worker that is ready costs the driver time
    started = run_until_killed(command, tmp_path / "log", ready, pause)
    # Ray's agents try to reach the control service, which is gone, for a minute before they end.
    workers = [process for process, title in started.items() if "Agent" not in title]
    assert len(workers) >= 4, "control service, node, workers"
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive, "what a killed driver started must go away"
    counted = corpus.count(root, lease, **MANY_TASKS)
    assert counted.executed == (name != "renamed")
    assert saved == again
    assert counted.digest == undisturbed.digest
    assert [path.name for path in root.glob("count/[!.]*")] == [counted.key]
