"""The whole pipeline on a small real corpus: real Ray Data, Prefect and MLflow."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient
from mlflow.entities import Run
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.logging.handlers import APILogWorker

from flows import parts
from flows.pipeline_flows import full_pipeline
from support.flow_runs import digests
from support.shared_services import PrefectServer
from support.tiny_pipeline import Walk, counting_in_process, save_backbone, tiny_recipe
from support.traces import CANARIES, Descendants, traces
from support.tracked_runs import runs_of
from tasks.cluster.ray_cluster import require_loopback
from tasks.report.comparison import COMPARISON_METRICS, COMPARISON_PARAMS
from tasks.run.recipes import find_recipe
from umim_core.checkpoint.checkpoint_index import own_checkpoints
from umim_core.store.artifacts import read_manifest

STAGES = {
    "corpus", "task", "tokenize", "count", "filter", "distill", "task-rules", "with-rules", "sft",
    "dpo", "evaluate", "task-score", "benchmark", "report",
}  # fmt: skip

pytestmark = pytest.mark.timeout(900)  # a whole run is in the fixture


class Finished:
    def __init__(self, base: Path, environment: pytest.MonkeyPatch, prefect: Path) -> None:
        self.root, self.prefect, self.report = base / "root", prefect, Path()
        self.uri = f"sqlite:///{base / 'mlflow.db'}"
        environment.setenv("UMIM_ROOT", str(self.root))
        environment.setenv("MLFLOW_TRACKING_URI", self.uri)
        for name, secret in CANARIES.items():
            environment.setenv(name, secret)
        self.recipe = base / "tiny.yaml"
        recipe = tiny_recipe(save_backbone(base / "small")).model_dump(mode="json")
        recipe["cells"].append({"backbone": "umim-docs-gpt2", "tau": 5})
        self.recipe.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        self.started = Descendants("RAY_AUTH_TOKEN")

    def launch(self) -> Path:
        """Run the pipeline, watching what it and its children open."""
        with self.started:
            return Path(full_pipeline(str(self.recipe)))

    def runs(self, kind: str) -> list[Run]:
        return runs_of(self.uri, kind)


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory,
    using_prefect: PrefectServer,
    two_cores: None,
    empty_store: Path,
) -> Iterator[Finished]:
    with pytest.MonkeyPatch.context() as environment:
        made = Finished(tmp_path_factory.mktemp("pipeline"), environment, using_prefect.database)
        shutil.copy(empty_store, made.uri.removeprefix("sqlite:///"))
        made.report = made.launch()
        yield made


def test_every_stage_leaves_one_artifact_per_use(run: Finished) -> None:
    assert {name.split("/")[0] for name in digests(run.root)} == STAGES
    assert not list(run.root.glob("*/*.partial"))


def test_the_count_on_the_cluster_is_that_of_one_process(run: Finished, tmp_path: Path) -> None:
    later = shutil.ignore_patterns(*STAGES - {"corpus", "task", "tokenize"})
    shutil.copytree(run.root, tmp_path / "root", ignore=later)
    alone: Any = Walk(tmp_path / "root", find_recipe(str(run.recipe)))
    with counting_in_process():
        parts.mine(alone, parts.prepare(alone))
    assert set(alone.executed()) == {"count", "filter"}
    made = {f"{call.name}/{call.artifact.key}": call.artifact.digest for call in alone.calls}
    assert made.items() <= digests(run.root).items()
    assert all(call.artifact.metrics["ngrams_2"] for call in alone.calls if call.name == "count")


def test_every_checkpoint_has_a_name_and_a_place_on_the_page_which_is_offline(
    run: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (run.report / "report.html").read_text(encoding="utf-8")
    places = json.loads((run.report / "report.json").read_text("utf-8"))["checkpoints"]
    assert len(places) == 5 and all(place["path"] in page for place in places)
    assert all((Path(place["path"]) / "manifest.json").is_file() for place in places)
    assert "umim-docs-gpt2" in page and "Task-Adapted" in page and 'src="http' not in page
    monkeypatch.setenv("UMIM_ROOT", str(run.root))
    settings = ("wt", "wt-rules", "wt-ft", "task-adapted")
    names = {f"tiny/small-tau-3-greedy-drop/{setting}" for setting in settings}
    assert set(own_checkpoints()) == names | {"tiny/docs-gpt2-tau-5-greedy-drop/wt"}


def test_mlflow_has_rows_stages_curves_and_live_numbers_by_the_names_others_query(
    run: Finished,
) -> None:
    rows = {row.data.params["setting"]: row.data for row in run.runs("comparison")}
    assert set(rows) == {"WT", "WT + Rules", "WT + FT", "Task-Adapted"}
    assert set(COMPARISON_PARAMS) <= set(rows["WT"].params)
    assert set(COMPARISON_METRICS) <= set().union(*(row.metrics for row in rows.values()))
    (pipeline,), stages = run.runs("pipeline"), run.runs("stage")
    assert pipeline.info.status == "FINISHED"
    assert {row.data.tags["umim.stage"] for row in stages} == STAGES
    assert {row.data.tags["mlflow.parentRunId"] for row in stages} == {pipeline.info.run_id}
    distilled = next(row for row in stages if row.data.tags["umim.stage"] == "distill")
    history = MlflowClient(run.uri).get_metric_history(distilled.info.run_id, "train_kl")
    assert [point.step for point in history] == [1, 2]
    for stage in ("distill", "sft", "dpo"):
        live = [name for name in pipeline.data.metrics if name.startswith(f"live/{stage} ")]
        assert any(name.endswith("/train_loss") for name in live), stage


def test_the_prefect_run_is_named_by_its_recipe_and_shows_our_lines(run: Finished) -> None:
    APILogWorker.drain_all(timeout=240)
    with get_client(sync_client=True) as client:
        (flow_run,) = [found for found in client.read_flow_runs() if found.name == str(run.recipe)]
        wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run.id]))
        lines = [line.message for line in client.read_logs(wanted)]
    for stage in ("corpus", "distill", "report"):
        assert any(line.startswith(f"{stage}: built in") for line in lines), stage


def test_everything_started_listens_on_loopback_only(run: Finished) -> None:
    require_loopback(run.started.sockets)
    names = {name for name, _, _ in run.started.sockets}
    assert {"gcs_server", "raylet"} <= names, "the cluster of the counting stage"
    assert any(name.startswith("ray::") for name in names), "its workers"
    assert any(name.startswith("python") for name in names), "the server of the flow run"


def test_secrets_of_the_environment_reach_no_result_and_no_log(run: Finished) -> None:
    APILogWorker.drain_all(timeout=240)
    tokens = sorted(run.started.values)  # of this run's cluster, and of one that tests share
    assert tokens
    secrets = CANARIES | {f"RAY_AUTH_TOKEN {n}": token for n, token in enumerate(tokens)}
    logs = sorted(run.prefect.parent.glob("*.db*"))
    assert any(b"corpus: built in" in path.read_bytes() for path in logs), "the run's lines"
    assert traces([run.recipe.parent, *logs], secrets) == []
    lines = run.started.command_lines
    assert not [line for line in lines if any(value in line for value in secrets.values())]


def test_second_run_executes_nothing_adds_no_run_and_reads_nothing_twice(
    run: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def noted(directory: Path, *, kind: str, schema: int, verify: bool = True) -> object:
        if verify:
            read.append(directory)
        return read_manifest(directory, kind=kind, schema=schema, verify=verify)

    monkeypatch.setattr("tasks.run.stage.read_manifest", noted)
    before = digests(run.root)
    counts = {kind: len(run.runs(kind)) for kind in ("pipeline", "stage", "comparison")}
    stamps = {path: path.stat().st_mtime_ns for path in run.root.glob("*/*/manifest.json")}
    assert run.launch() == run.report
    assert digests(run.root) == before
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert {kind: len(run.runs(kind)) for kind in counts} == counts
    assert sorted(read) == sorted(run.root / name for name in before)
