from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from support.small_recipe import write_recipe
from tasks.run.stage import STAGE_SCHEMA
from umim_core.store.artifacts import MANIFEST, read_manifest

CHECKOUT = Path(__file__).resolve().parents[2]
RUNS = 8
STAGES = {
    "corpus", "task", "tokenize", "count", "filter", "distill", "evaluate", "task-score", "report",
}  # fmt: skip


def start(number: int, folder: Path) -> subprocess.Popen[bytes]:
    """Start the command line on a recipe of its own name; every other run has another root."""
    recipe = write_recipe(folder / f"run-{number}.yaml", cluster={"workers": 0, "cpus": 1})
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")]),
        "UMIM_ROOT": str(folder / f"root-{number % 2}"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "900",
    }
    with (folder / f"run-{number}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "flows", "run", str(recipe)],
            cwd=CHECKOUT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def whole_artifacts(root: Path) -> dict[str, str]:
    """Digests of all artifacts but the reports, once every file was read."""
    digests = {}
    for path in root.glob(f"*/*/{MANIFEST}"):
        if path.parent.parent.name != "mlruns":
            manifest = read_manifest(path.parent, kind="stage", schema=STAGE_SCHEMA)
            digests[f"{manifest['stage']}/{manifest['key']}"] = str(manifest["digest"])
    return digests


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_eight_pipelines_at_once_lose_nothing(tmp_path: Path, empty_store: Path) -> None:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    processes = [start(number, tmp_path) for number in range(RUNS)]
    for number, process in enumerate(processes):
        log = tmp_path / f"run-{number}.log"
        assert process.wait() == 0, log.read_text("utf-8", errors="replace")[-4000:]
    held = [whole_artifacts(tmp_path / f"root-{number}") for number in range(2)]
    assert not list(tmp_path.glob("root-*/*/*.partial"))
    reports = [[name for name in digests if name.startswith("report/")] for digests in held]
    assert [len(names) for names in reports] == [RUNS // 2, RUNS // 2]
    equal = [{n: d for n, d in digests.items() if not n.startswith("report/")} for digests in held]
    assert equal[0] == equal[1]
    assert {name.split("/")[0] for name in held[0]} == STAGES

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("umim")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], max_results=1000)
    of_kind = {
        kind: {run.info.run_id: run for run in runs if run.data.tags["umim.kind"] == kind}
        for kind in ("pipeline", "stage", "comparison")
    }
    assert sorted(run.data.tags["umim.recipe"] for run in of_kind["pipeline"].values()) == [
        f"run-{number}" for number in range(RUNS)
    ]
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert len(of_kind["stage"]) == sum(map(len, held)), "one for each artifact of each root"
    for run in of_kind["pipeline"].values():
        named = {
            name.split(".")[2]: value
            for name, value in run.data.tags.items()
            if name.startswith("umim.stage.")
        }
        assert set(named) == STAGES and set(named.values()) <= set(of_kind["stage"])
