from __future__ import annotations

import json
import os
import re
import secrets
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

import tasks.stages.mine
from support.processes import output_of
from support.source_tree import ROOT
from support.tiny_mining import InProcess, NoCluster, TinyCorpus

SECONDS = 240
# Starts three nodes, counts, and removes the second node once it runs what is asked for.
PROGRAM = """
import json, sys, threading
from pathlib import Path
import psutil
from ray.cluster_utils import Cluster
from tasks.cluster.lease import ClusterLease
from tasks.run.stage import Artifact
from support.tiny_mining import TinyCorpus, titles
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
corpus = TinyCorpus(None, None, artifact, backbone)
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
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    doing: str,
    graceful: bool,
) -> None:
    corpus = TinyCorpus.make(tmp_path / "corpus", tiny_tokenizer, 20_007)
    with pytest.MonkeyPatch.context() as patch:
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
        command = [sys.executable, "-c", PROGRAM, json.dumps(arguments, default=str)]
        printed = output_of(*command, seconds=SECONDS, without=("RAY_",), **environment)
    # Ray's own lines come in between.
    removed, outcome = re.findall("^(?:removed|digest|refused).*", printed, re.MULTILINE)
    assert removed.startswith(f"removed {doing}"), "the node was doing it"
    assert outcome == f"digest {want}" or outcome.startswith("refused the workers that count must")
    if outcome.startswith("refused"):
        assert not list(root.glob("count/*/manifest.json"))
