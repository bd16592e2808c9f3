"""Runs on a real sqlite store are found again, never lost, never doubled."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from sqlalchemy.engine import make_url

from support.tracked_runs import held, record_pipeline, runs_of
from tasks.report.comparison import COMPARISON_METRICS, COMPARISON_PARAMS, Measured, cell_row
from tasks.run.services import local_services
from tasks.tracking import tracker as tracking
from tasks.tracking.compare_view import ADAPTATION_SOURCE
from tasks.tracking.tracker import PREFECT_TAG, Tracker, flatten
from umim_core.checkpoint.checkpoint_index import artifact_root
from umim_core.config.recipe import DEFAULT_TASK, Cell


@pytest.fixture
def tracker(tmp_path: Path, store: str) -> Tracker:
    return Tracker(store, tmp_path / "root")


def run_of(tracker: Tracker, kind: str, key: str) -> Run:
    """The run of a kind and key; a second one fails."""
    (run,) = [run for run in runs_of(tracker.uri, kind) if run.data.tags["umim.key"] == key]
    return run


def test_a_stage_run_holds_params_metrics_curves_files_and_inputs(
    tracker: Tracker, tmp_path: Path
) -> None:
    (tmp_path / "rules" / "deep").mkdir(parents=True)
    for name in ("note.txt", "rules/deep/a.txt"):
        (tmp_path / name).write_text("a")
    tracker.pipeline_run("p1", {"recipe": "tiny"})
    curve = [(step, 1.0 / (step + 1)) for step in range(2500)]
    tracker.stage_run(
        "p1",
        "distill",
        "d1",
        {"steps": 0, "optimiser": {"lr": 0.002}},
        {"kl": 0.0, "top1": None, "broken": float("nan"), "pass@1": 0.25},
        [*(("train_loss", step, loss) for step, loss in curve), ("zero", 0, 0.0)],
        [tmp_path / "note.txt", tmp_path / "rules"],
    )
    tracker.pipeline_run("p2", {})
    tracker.stage_run("p2", "distill", "d1", {}, {"kl": 9.0})  # as another pipeline finds it
    tracker.finish("p1")
    run, client = run_of(tracker, "stage", "d1"), MlflowClient(tracker.uri)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"steps": "0", "optimiser.lr": "0.002"}
    numbers = {"kl": 0.0, "pass_at_1": 0.25, "zero": 0.0, "train_loss": curve[-1][1]}
    assert run.data.metrics == numbers
    history = client.get_metric_history(run.info.run_id, "train_loss")
    assert sorted((m.step, m.value) for m in history) == curve
    assert held(tracker.uri)["stage d1"]["files"] == ["note.txt", "rules/deep/a.txt"]
    for parent in ("p1", "p2"):
        named = run_of(tracker, "pipeline", parent).data.tags["umim.stage.distill.d1"]
        assert named == run.info.run_id
    assert run.data.tags["mlflow.parentRunId"] == run_of(tracker, "pipeline", "p1").info.run_id


def test_runs_are_completed_opened_again_and_never_reopened_once_finished(tracker: Tracker) -> None:
    tracker.pipeline_run("p", {"a": 1}, {PREFECT_TAG: "first"})
    for _ in range(2):
        tracker.stage_run("p", "count", "c", {"tau": 5}, {"n": 7.0}, [("seen", 1, 1.0)])
        stage = run_of(tracker, "stage", "c")
        assert stage.info.status == "FINISHED"
        MlflowClient(tracker.uri).update_run(stage.info.run_id, "RUNNING")  # as a crash leaves it
    history = MlflowClient(tracker.uri).get_metric_history(stage.info.run_id, "seen")
    assert len(history) == 1
    for status, opened in (("FAILED", "RUNNING"), ("FINISHED", "FINISHED"), ("KILLED", "FINISHED")):
        tracker.finish("p", status)
        tracker.pipeline_run("p", {"a": 1}, {PREFECT_TAG: status})
        run = run_of(tracker, "pipeline", "p")
        assert (run.info.status, run.data.tags[PREFECT_TAG]) == (opened, status)


def test_numbers_of_a_stage_under_way_are_points_of_its_pipeline(tracker: Tracker) -> None:
    tracker.pipeline_run("p", {"recipe": "tiny"})
    stage = "distill a-model \u03c4 5 greedy+drop"
    tracker.live("p", stage, {"train_loss": (3, 2.5), "lr": (3, 1e-3)})
    tracker.live("p", stage, {"train_loss": (7, 2.25), "valid_kl": (6, float("nan"))})
    name = "live/distill a-model \u03c4 5 greedy drop"
    assert held(tracker.uri)["pipeline p"]["points"] == {
        f"{name}/train_loss": [[3, 2.5], [7, 2.25]],
        f"{name}/lr": [[3, 1e-3]],
    }


def test_a_comparison_run_is_flat_and_has_the_names_others_query(tracker: Tracker) -> None:
    values = {"top1": 0.5, "ppl_umim_ood_stdlib": 40.0, "mrr": float("nan")}
    scores = {(DEFAULT_TASK, "base"): {"acc_tok": Measured(value=0.6)}}
    scores |= {(DEFAULT_TASK, "WT"): {"acc_tok": Measured(value=0.5)}}
    row = cell_row(Cell(backbone="umim-docs-llama"), seed=0, metrics=values, scores=scores)
    tracker.pipeline_run("flat", {}, {"umim.recipe": "novels"})
    tracker.comparison_run("flat", "flat-1", "flat-1", row.params(), row.measured())
    run = run_of(tracker, "comparison", "flat-1")
    data, metrics = run.data, {"top1": 0.5, "ppl_umim_ood_stdlib": 40.0}
    assert data.metrics == metrics | {"accuracy_base": 0.6, "accuracy_umim": 0.5}
    assert data.tags["umim.pipeline"] == run_of(tracker, "pipeline", "flat").info.run_id
    assert set(data.params) == {*COMPARISON_PARAMS, "method", "form", "recipe"}
    assert data.params["form"] == "attention, depth 1, positions none"
    assert (data.params["method"], data.params["recipe"]) == ("umim", "novels")
    assert run.info.run_name == "flat-1 · novels" and data.params["tau"] == "5"


@pytest.mark.parametrize("accuracy", [["accuracy_umim"], []], ids=["a task", "no task"])
def test_the_comparison_is_shown_without_a_click(
    accuracy: list[str], tracker: Tracker, tmp_path: Path
) -> None:
    assert tracker.link() == ""
    shown = ["token_reduction", "top1", "kl", *accuracy]
    record_pipeline(tracker, "p", tmp_path / "files")
    rows = [(5, "attention", shown), (5, "a baseline", ["ppl_half_umim"]), (6, "attention", shown)]
    for number, (tau, kind, metrics) in enumerate(rows):
        values = dict.fromkeys(metrics, 0.5)
        tracker.comparison_run("p", f"row-{number}", "a row", {"tau": tau, "kind": kind}, values)
    point = dict.fromkeys(["token_reduction", "difference"], 0.0)
    tracker.comparison_run("p", "point", "a point", {}, point, source=ADAPTATION_SOURCE)
    command, _, link = tracker.link().partition(", then ")
    assert command == f"mlflow ui --backend-store-uri {tracker.uri}"
    assert link.startswith("http://127.0.0.1:5000/#/experiments/")
    name = link.partition("viewStateShareKey=")[2]
    experiment = MlflowClient(tracker.uri).get_experiment(tracker.experiment_id)
    state = json.loads(experiment.tags[f"mlflow.sharedViewState.{name}"])
    (chart,) = state["compareRunCharts"]
    assert chart["selectedParams"] == ["tau"]  # what is one value of all rows is no axis
    assert "params.`form`" in state["selectedColumns"]
    assert chart["selectedMetrics"] == shown
    assert set(chart["selectedMetrics"]) <= set(COMPARISON_METRICS)
    found = runs_of(tracker.uri, query=state["searchFilter"])
    assert {run.info.run_name for run in found} == {"p-row", "a row"}


def test_a_checkpoint_is_registered_once_under_its_backbones_alias(
    tracker: Tracker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = {"config.json", "model.safetensors", "rules/manifest.json"}
    for name in names:
        (tmp_path / "checkpoint" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "checkpoint" / name).write_text(name)
    tracker.pipeline_run("p", {})
    tracker.stage_run("p", "distill", "d", {}, {})

    def registered(by: Tracker, alias: bool = True) -> None:
        by.register_checkpoint("lab/model-1.5", tmp_path / "checkpoint", "d", alias=alias)
        by.finish("p")

    upload, side = MlflowClient.log_artifacts, list[Future[None]]()
    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as slow:

        def beside(*args: Any) -> None:  # another run of the root begins while this one uploads
            if not side:
                side.append(pool.submit(registered, Tracker(tracker.uri, tracker.root)))
                wait(side, 2)
            upload(*args)

        slow.setattr(MlflowClient, "log_artifacts", beside)
        registered(tracker, alias=False)
    side[0].result()
    for _ in range(2):
        registered(tracker)
    # A run that asked the store before these names were made makes them too.
    with monkeypatch.context() as before:
        before.setattr(MlflowClient, "search_registered_models", lambda *_: [])
        found = [None, MlflowClient(tracker.uri).get_experiment_by_name("umim")]
        before.setattr(MlflowClient, "get_experiment_by_name", lambda *_: found.pop(0))
        registered(Tracker(tracker.uri, tracker.root))
    assert not found and "MLflow lacks" not in caplog.text
    client = MlflowClient(tracker.uri, tracker.uri)
    found = client.get_model_version_by_alias("umim", "lab-model-1-5")
    (version,) = client.search_model_versions("name = 'umim'")
    assert found.run_id == version.run_id == run_of(tracker, "stage", "d").info.run_id
    assert version.tags == {"umim.backbone": "lab/model-1.5"}
    place = Path(client.download_artifacts(version.run_id, "checkpoint/lab-model-1-5"))
    assert names == {path.relative_to(place).as_posix() for path in place.rglob("*.*")}


def test_secrets_are_hidden_and_names_that_only_sound_like_them_are_not() -> None:
    flat = flatten({"hub": {"api_key": "s3cret", "token": "s3cret"}, "token_reduction": 0.4})
    assert flat == {"hub.api_key": "***", "hub.token": "***", "token_reduction": "0.4"}


def stopped(tracker: Tracker) -> None:
    """A pipeline of the same key that measures a row and is stopped."""
    tracker.pipeline_run("p", {"recipe": "tiny"}, name="tiny")
    tracker.comparison_run("p", "p-row", "p-row", {"tau": 5}, {"top1": 0.25})
    tracker.finish("p", "KILLED")


def test_each_root_and_user_has_runs_of_its_own(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_pipeline(Tracker(store, tmp_path / "hers"), "p", tmp_path / "files")
    stopped(Tracker(store, tmp_path / "his"))
    (tmp_path / "his").rename(tmp_path / "moved")
    stopped(Tracker(store, tmp_path / "moved"))
    pipelines = runs_of(store, "pipeline")
    rows = {run.data.tags["umim.pipeline"]: run for run in runs_of(store, "comparison")}
    measured = {p.info.status: rows[p.info.run_id].data.metrics["top1"] for p in pipelines}
    assert (len(pipelines), measured) == (2, {"FINISHED": 0.5, "KILLED": 0.25})
    monkeypatch.setenv("LOGNAME", "o'brien")
    stopped(Tracker(store, tmp_path / "moved"))
    users = [run.data.tags["mlflow.user"] for run in runs_of(store, "pipeline")]
    assert len(users) == 3 and "o_brien" in users
    monkeypatch.setenv("UMIM_ROOT", "s3://bucket/umim")
    owners = []
    for scratch in ("one", "two"):
        monkeypatch.setenv("UMIM_SCRATCH", str(tmp_path / scratch))
        assert Tracker().root == artifact_root() == tmp_path / scratch
        owners.append(Tracker().owner)
    assert owners[0] == owners[1] and not (tmp_path / "one").exists()


@pytest.mark.parametrize("folder", ["a%20b", "a b", "a?b", "a#b", "a%3Fb", "a@b:c+d", "ä"])
def test_default_databases_lie_in_their_folder_whatever_its_name(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(tracking, "CHECKOUT", tmp_path / folder)
    services = {service.name: service.command for service in local_services(tmp_path / folder)}
    for address in (Tracker().uri, services["mlflow"][-1]):
        assert make_url(address).database == str(tmp_path / folder / "mlflow.db")
