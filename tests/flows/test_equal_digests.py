from __future__ import annotations

from pathlib import Path

import pytest

from support.flow_runs import digests, said, start
from support.s3 import s3_server
from support.small_recipe import RECIPE, write_recipe
from support.tracked_runs import runs_of

_STEP = {"max_steps": 3, "batch_size": 2, "learning_rate": 0.002, "validate_every": 1}
_STEP |= {"validation_rows": 2, "checkpoint_every": 2}
_OTHER = {"backbone": "umim-docs-gpt2", "tau": 8, "containment": "keep"}
FIELDS = {
    "seed": 5,
    "corpus": RECIPE["corpus"] | {"train_tokens": 60000},
    "cells": [
        {"backbone": "umim-docs-llama", "tau": 5, "adapt": True},
        {**_OTHER, "module_positions": "learned"},
    ],
    "distill": _STEP,
    "adapt": {
        "rules": {"tau": 3, "overlap": "none", "containment": "keep"},
        "sft": _STEP,
        "dpo": {**_STEP, "beta": 0.1},
    },
    "cluster": {"workers": 0},
}


def run(root: Path, recipe: Path, **environment: str) -> dict[str, str]:
    """Run the pipeline in a process of its own; return the digests of what holds no times."""
    root.parent.mkdir()
    assert start(root, recipe, **environment).wait(1800) == 0, said(root)
    return digests(root, "benchmark", "report")


@pytest.mark.full
def test_one_seed_leaves_the_same_artifacts_and_object_storage_holds_them(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "twice.yaml", **FIELDS)
    roots = [tmp_path / name / "root" for name in ("local", "one", "two")]
    local = run(roots[0], recipe, PYTHONHASHSEED="1")
    stages = {name.split("/")[0] for name in local}
    assert {"corpus", "tokenize", "count", "filter", "distill", "sft", "dpo", "evaluate"} <= stages
    manifests = []
    with s3_server() as settings:
        for seed, root in enumerate(roots[1:], 2):
            storage = {"UMIM_ROOT": "s3://umim/runs", "UMIM_SCRATCH": str(root)}
            assert run(root, recipe, PYTHONHASHSEED=str(seed), **settings, **storage) == local
            found = root.glob("*/*/manifest.json")
            manifests.append({path.relative_to(root): path.read_bytes() for path in found})
    assert manifests[0] == manifests[1], "something was built a second time"


RUNS = 8
STAGES = {
    "corpus", "task", "tokenize", "count", "filter", "distill", "evaluate", "task-score", "report",
}  # fmt: skip


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_eight_pipelines_at_once_share_a_store_that_none_has_made(tmp_path: Path) -> None:
    processes = []
    for number in range(RUNS):  # every other one has another root
        path = tmp_path / f"run-{number}.yaml"
        recipe = write_recipe(path, cluster={"workers": 0, "cpus": 1})
        own = {"UMIM_ROOT": str(tmp_path / f"root-{number % 2}")}
        processes.append(start(path.with_suffix(""), recipe, **own))
    for number, process in enumerate(processes):
        assert process.wait() == 0, said(tmp_path / f"run-{number}")
    held = [digests(tmp_path / f"root-{number}") for number in range(2)]
    assert not list(tmp_path.glob("root-*/*/*.partial"))
    reports = [[name for name in own if name.startswith("report/")] for own in held]
    assert [len(names) for names in reports] == [RUNS // 2, RUNS // 2]
    one, other = (digests(tmp_path / f"root-{number}", "report") for number in range(2))
    assert one == other
    assert {name.split("/")[0] for name in held[0]} == STAGES

    runs = runs_of(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert {run.info.status for run in runs} == {"FINISHED"}
    kinds = ("pipeline", "stage")
    pipelines, stages = ([r for r in runs if r.data.tags["umim.kind"] == kind] for kind in kinds)
    names = sorted(run.data.tags["umim.recipe"] for run in pipelines)
    assert names == [f"run-{number}" for number in range(RUNS)]
    assert len(stages) == sum(map(len, held)), "one for each artifact of each root"
    for run in pipelines:
        tags = run.data.tags.items()
        named = {n.split(".")[2]: value for n, value in tags if n.startswith("umim.stage.")}
        assert set(named) == STAGES and set(named.values()) <= {run.info.run_id for run in stages}
