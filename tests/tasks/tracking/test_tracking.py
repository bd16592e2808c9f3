"""Runs on a real sqlite store are found again, never lost, never doubled.

A store that is away costs a run seconds at most; the same run again records what it missed.
"""

from __future__ import annotations

import json
import logging
import shutil
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from sqlalchemy.engine import make_url

from support.tracked_runs import held, of_run, record_pipeline, runs_of
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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> dict[str, Any]:
    base = tmp_path_factory.mktemp("undisturbed")
    copy = shutil.copy(empty_store, base / "mlflow.db")
    record_pipeline(Tracker(f"sqlite:///{copy}", base), "plain", base / "files")
    return of_run(f"sqlite:///{copy}", "plain")


@pytest.mark.parametrize("answers", [False, True], ids=["closed", "silent"])
def test_a_run_without_a_server_ends_soon_and_the_same_run_again_is_recorded(
    answers: bool,
    tmp_path: Path,
    store: str,
    undisturbed: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "umim.tracking")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if answers:
            server.listen()
        uri, began = f"http://127.0.0.1:{server.getsockname()[1]}", time.monotonic()
        record_pipeline(Tracker(uri, tmp_path), "again", tmp_path / "files")
        assert time.monotonic() - began < 60  # a store that is asked at each record takes 85
    first, *_, last = (record.getMessage() for record in caplog.records)
    assert first.startswith("MLflow lacks a record, the run goes on") and uri in first
    assert last.startswith("MLflow lacks a part of this run: 7 records, files of 3 stages")
    record_pipeline(Tracker(store, tmp_path), "again", tmp_path / "files")
    assert of_run(store, "again") == undisturbed


def test_what_was_missed_in_a_short_absence_is_sent_at_the_end(
    tmp_path: Path, store: str, undisturbed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    place = Path(store.removeprefix("sqlite:///"))
    away = place.rename(place.with_suffix(".away"))
    place.mkdir()  # sqlite cannot open it
    tracker = Tracker(store, tmp_path / "root")
    tracker.pipeline_run("short", {"recipe": "tiny", "token": "s3cret"}, name="tiny")
    place.rmdir()
    away.rename(place)
    record_pipeline(tracker, "short", tmp_path / "files")
    assert of_run(store, "short") == undisturbed
    assert [line for line in caplog.messages if "MLflow" in line] == [caplog.messages[0]]


def test_files_that_cannot_be_kept_cost_no_numbers_and_the_same_run_sends_them(
    tmp_path: Path, store: str, undisturbed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "mlruns").write_text("no folder")
    record_pipeline(Tracker(store, root), "where", tmp_path / "files")
    recorded = of_run(store, "where")
    for name, run in undisturbed.items():
        assert recorded[name]["points"] == run["points"] and recorded[name]["files"] == []
        assert recorded[name]["status"] == "FINISHED"
    assert "0 records, files of 3 stages" in caplog.text
    (root / "mlruns").unlink()
    record_pipeline(Tracker(store, root), "where", tmp_path / "files")
    assert of_run(store, "where") == undisturbed
    [kept] = (root / "mlruns").rglob("a.txt")
    kept.write_text("changed")
    record_pipeline(Tracker(store, root), "where", tmp_path / "files")
    assert kept.read_text() == "changed", "what is there is not sent again"


def test_what_a_stopped_run_leaves_is_left_to_the_same_command(tmp_path: Path, store: str) -> None:
    (tmp_path / "note.txt").write_text("hello")
    for status, kept in (("KILLED", []), ("FINISHED", ["note.txt"])):
        tracker = Tracker(store, tmp_path / "root")
        tracker.attach("p", [tmp_path / "note.txt"])
        tracker.finish("p", status)
        run = held(store)["pipeline p"]
        assert (run["status"], run["files"]) == (status, kept)


def test_a_record_that_the_store_refuses_lets_the_others_pass(
    tmp_path: Path, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracker(store, tmp_path / "root")
    tracker.pipeline_run("p", {"a": 1})
    tracker.pipeline_run("p", {"a": 2})  # MLflow never changes a parameter
    tracker.attach("p", [Path("/absent.txt")])  # short: an error shows the first 200 characters
    tracker.finish("p")
    run = held(store)["pipeline p"]
    assert (run["status"], run["params"]) == ("FINISHED", {"a": "1"})
    assert "absent.txt" in caplog.text and "1 records, files of 1 stages" in caplog.text
    client = MlflowClient(store)
    client.delete_experiment(tracker.experiment_id)
    Tracker(store, tmp_path / "root").pipeline_run("q", {})
    client.restore_experiment(tracker.experiment_id)
    assert "must not be deleted" in caplog.text and len(runs_of(store)) == 1


def test_a_root_that_cannot_be_written_costs_records_and_not_the_run(
    tmp_path: Path, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "root").write_text("no folder")
    Tracker(store, tmp_path / "root").live("p", "distill", {"train_loss": (1, 1.0)})
    assert "MLflow lacks a record, the run goes on" in caplog.text


@pytest.mark.parametrize(
    "address",
    [
        "sqlite:////proc/none/m.db",
        "sqlite:///{0}/text",
        "sqlite://user:word@host/m.db",
        "postgresql+nodriver://me:word@127.0.0.1:9/x",
        "postgresql://me:word@127.0.0.1:9/x",
        "http://me:word@127.0.0.1:9",
    ],
)
def test_a_store_that_cannot_be_opened_is_one_line_in_seconds(
    address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # m.db of an address with a host is a file of this folder
    (tmp_path / "text").write_text("no database " * 100)
    tracker, began = Tracker(address.format(tmp_path), tmp_path / "root"), time.monotonic()
    with caplog.at_level(logging.INFO):
        tracker.pipeline_run("p", {})
        tracker.live("p", "distill", {"kl": (0, 0.0)})
    assert time.monotonic() - began < 60  # MLflow's own tries take 102
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("MLflow lacks a record, the run goes on") and "\n" not in line
    assert address.format(tmp_path).replace("user:word", "***").replace("me:word", "***") in line


def test_threads_share_a_store_and_lose_nothing(
    tmp_path: Path, store: str, undisturbed: dict[str, Any]
) -> None:
    names = [f"thr-{number}" for number in range(3)]
    with ThreadPoolExecutor(len(names)) as pool:
        trackers = [Tracker(store, tmp_path) for _ in names]
        list(pool.map(record_pipeline, trackers, names, [tmp_path / name for name in names]))
    assert [of_run(store, name) for name in names] == [undisturbed] * 3
