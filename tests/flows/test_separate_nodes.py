from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.machines import Machine, machines
from support.processes import output_of
from support.ray_nodes import answer_on, cluster_of
from support.s3 import s3_files, s3_server
from support.tiny_pipeline import save_backbone, tiny_recipe, walk
from tasks.cluster.ray_cluster import CHECKOUT
from tasks.data import tokenizing
from umim_core.config.recipe import Recipe

DRIVER = """
import json, sys
from flows import parts
from support.tiny_pipeline import Walk
from tasks.cluster.lease import ClusterLease
from umim_core.checkpoint.checkpoint_index import artifact_root
from umim_core.config.recipe import Recipe

run = Walk(artifact_root(), Recipe.model_validate_json(sys.argv[1]))
with ClusterLease(run.recipe.cluster, run.root) as run.lease:
    parts.run_everything(run)
print("answer", json.dumps(run.digests()))
"""


def recipe_of(backbone: Path, endpoint: str, **cluster: Any) -> Recipe:
    """A recipe whose texts lie in storage, several files a split; a block is a few sentences."""
    options = f"endpoint_override={endpoint.removeprefix('http://')}&scheme=http"
    corpus: dict[str, Any] = {"kind": "files"}
    for split in ("train", "valid", "test"):
        corpus[split] = {"kind": "text", "paths": [f"s3://umim/texts/{split}-*.txt?{options}"]}
    tiny = tiny_recipe(backbone).model_dump(exclude={"adapt", "task", "benchmark"})
    tiny["cells"] = [{"backbone": str(backbone), "tau": 3}]
    tiny |= {"corpus": corpus, "mining": {"block_tokens": 512}, "cluster": cluster}
    return Recipe.model_validate(tiny | {"task": None, "benchmark": None})


def fetched(machine: Machine, root: Path) -> set[str]:
    """Return the stages that lie in a machine's own root."""
    listed = output_of(*machine.enter, "find", root, "-name", "manifest.json")
    return {Path(line).relative_to(root).parts[0] for line in listed.splitlines()}


@pytest.mark.full
def test_nodes_without_a_shared_disk_leave_what_one_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch, backbone = tmp_path / "scratch", save_backbone(tmp_path / "backbone")
    with machines(3, scratch) as (here, three), s3_server(host=here) as settings:
        for name, value in {**settings, "OMP_NUM_THREADS": "1"}.items():
            monkeypatch.setenv(name, value)
        files = s3_files(settings)
        for number, split in enumerate(["valid", "test", *["train"] * 6]):
            text = f"Return the sum of the array elements over axis {number}. " * 100
            files.pipe_file(f"umim/texts/{split}-{number}.txt", text.encode())
        endpoint = settings["AWS_ENDPOINT_URL"]
        with pytest.MonkeyPatch.context() as patch:
            here = lambda jobs, _: [*map(tokenizing.tokenize_file, jobs)]  # noqa: E731
            patch.setattr(tokenizing, "_run_on_cluster", here)
            alone = walk(tmp_path / "alone", recipe_of(backbone, endpoint, workers=0))
        with cluster_of(three, tmp_path, CHECKOUT) as address:
            recipe = recipe_of(backbone, endpoint, address=address, workers=1)
            storage = {"UMIM_ROOT": "s3://umim/runs", "UMIM_SCRATCH": str(scratch)}
            digests = answer_on(three[0], CHECKOUT, DRIVER, recipe.model_dump_json(), **storage)
        on_nodes = [fetched(other, scratch) for other in three[1:]]
        stored = {path.split("/")[3] for path in files.find("umim/runs/stages")}
    answer = [tuple(pair) for pair in digests]
    assert answer == alone.digests()
    built = {name for name, _ in answer}
    assert {"corpus", "tokenize", "count", "filter", "distill", "evaluate"} <= built == stored
    assert all("tokenize" in stages for stages in on_nodes), "each counts in a copy of its own"
