from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient

from support.flow_runs import digests, said, start
from support.small_recipe import write_recipe

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
