from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from support.flow_runs import digests, said, start
from support.processes import output_of
from support.ray_nodes import paths
from support.s3 import s3_server
from support.small_recipe import RECIPE, write_recipe
from support.source_tree import ROOT
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
EXEMPT = {"benchmark", "report"}  # they hold times and facts of the machine
PROGRAM = """
import sys
from prefect.testing.utilities import prefect_test_harness
from flows.pipeline_flows import full_pipeline
print("hash", hash("umim"))
with prefect_test_harness(server_startup_timeout=180):
    full_pipeline(sys.argv[1])
"""


def run(
    folder: Path, recipe: Path, hash_seed: int, storage: Mapping[str, str] | None = None
) -> tuple[str, dict[str, str]]:
    """Run the pipeline in a new process; return a hash it saw and its artifacts' digests."""
    folder.mkdir()
    environment = {
        "PYTHONPATH": paths(ROOT),
        "PYTHONHASHSEED": str(hash_seed),
        "UMIM_ROOT": str(folder / "root"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
        **(storage or {}),
    }
    command = [sys.executable, "-c", PROGRAM, recipe]
    printed = output_of(*command, cwd=folder, seconds=1800, **environment)
    (seen,) = [line for line in printed.splitlines() if line.startswith("hash ")]
    return seen, digests(folder / "root", *EXEMPT)


@pytest.mark.full
def test_one_seed_leaves_the_same_artifacts_and_object_storage_holds_them(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "twice.yaml", **FIELDS)
    seen, local = run(tmp_path / "local", recipe, hash_seed=1)
    stages = {name.split("/")[0] for name in local}
    assert {"corpus", "tokenize", "count", "filter", "distill", "sft", "dpo", "evaluate"} <= stages
    with s3_server() as settings:
        scratch = {name: str(tmp_path / name / "root") for name in ("one", "two")}
        storage = {**settings, "UMIM_ROOT": "s3://umim/runs"}
        other, one = run(tmp_path / "one", recipe, 2, storage | {"UMIM_SCRATCH": scratch["one"]})
        times = {p: p.read_bytes() for p in (tmp_path / "one" / "root").glob("*/*/manifest.json")}
        _, two = run(tmp_path / "two", recipe, 3, storage | {"UMIM_SCRATCH": scratch["two"]})
    assert seen != other, "both processes had the same hash seed"
    assert local == one == two
    for path, manifest in times.items():  # nothing was built a second time
        assert (tmp_path / "two" / path.relative_to(tmp_path / "one")).read_bytes() == manifest


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
        assert set(named) == STAGES and set(named.values()) <= {of.info.run_id for of in stages}
