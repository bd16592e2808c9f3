"""A store that is away costs a run seconds at most, and nothing of what it records."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from flows.cli import app
from support.tracked_runs import held, record_pipeline
from tasks.report.comparison import COMPARISON_METRICS
from tasks.tracking.compare_view import ADAPTATION_SOURCE, SOURCE_TAG
from tasks.tracking.patience import Patience
from tasks.tracking.spool import SPOOL, Spool
from tasks.tracking.tracker import REPLAY_COMMAND, Tracker
from umim_core.errors import TrackingError

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> dict[str, Any]:
    """What a store holds of a run that it was there for."""
    base = tmp_path_factory.mktemp("undisturbed")
    copy = shutil.copy(empty_store, base / "mlflow.db")
    tracker = Tracker(f"sqlite:///{copy}", base)
    record_pipeline(tracker, "p", base / "files")
    assert not list((base / SPOOL).glob("*.json"))
    return held(tracker.uri)


def require_pipelines(found: dict[str, Any], names: list[str], undisturbed: dict[str, Any]) -> None:
    """Hold what a store has of several pipelines against what it has of one."""
    assert len(found) == len(names) * (len(undisturbed) - 1) + 1
    for name in names:
        for run in undisturbed:
            if run.startswith(("pipeline", "stage")):
                twin = found[run.replace(" p", f" {name}", 1)]
                assert twin["points"] == undisturbed[run]["points"], run
                assert twin["files"] == undisturbed[run]["files"], run
                assert twin["status"] == "FINISHED"


@pytest.fixture
def closed() -> Iterator[str]:
    """The address of a server that is not there."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def test_a_run_without_a_server_ends_well_and_the_next_one_writes_it(
    tmp_path: Path,
    store: str,
    closed: str,
    undisturbed: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "umim.tracking"):
        record_pipeline(Tracker(closed, tmp_path), "p", tmp_path / "files")
    away, waiting = (record.getMessage() for record in caplog.records)
    assert away.startswith("MLflow is away, the run goes on")
    assert f"records for MLflow wait in {tmp_path / SPOOL}" in waiting
    assert REPLAY_COMMAND in waiting
    there = Tracker(store, tmp_path)
    there.pipeline_run("p", {"recipe": "tiny", "token": "s3cret"}, name="tiny")
    assert not there.replay()[0]
    assert held(there.uri) == undisturbed


def test_records_written_twice_are_there_once(
    tmp_path: Path, store: str, closed: str, undisturbed: dict[str, Any]
) -> None:
    record_pipeline(Tracker(closed, tmp_path), "p", tmp_path / "files")
    shutil.copytree(tmp_path / SPOOL, tmp_path / "again")
    for _ in range(2):  # as if killed after the store had them, before they were forgotten
        assert not Tracker(store, tmp_path).replay()[0]
        shutil.copytree(tmp_path / "again", tmp_path / SPOOL, dirs_exist_ok=True)
    Tracker(store, tmp_path).replay()
    assert held(store) == undisturbed


@pytest.mark.full
def test_a_server_that_never_answers_costs_a_run_less_than_ten_seconds(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracker = Tracker(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path)
        began = time.monotonic()
        record_pipeline(tracker, "p", tmp_path / "files")
        assert time.monotonic() - began < 10


def test_a_run_that_is_being_stopped_waits_two_seconds_at_most(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracker = Tracker(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path)
        began = time.monotonic()
        tracker.finish("p", "KILLED")
        assert time.monotonic() - began < 4
    assert len(list((tmp_path / SPOOL).glob("*.json"))) == 1


def test_patience_lasts_ten_seconds_and_rests_longer_each_time() -> None:
    patience = Patience()
    assert patience.limits() == (300, 5, 5)
    patience.failed(5.0)
    assert patience.resting()
    assert patience.limits() == (2, 2, 5)
    patience.failed(2.0)
    patience.failed(2.0)
    assert not patience.exhausted
    assert patience.limits() == (1, 1, 1)
    patience.failed(1.0)
    assert patience.exhausted


def test_refused_connections_never_exhaust_patience() -> None:
    patience = Patience()
    for _ in range(1000):
        patience.failed(0.001)
    assert not patience.exhausted


def test_a_record_that_the_store_refuses_lets_the_others_pass(tmp_path: Path, store: str) -> None:
    tracker = Tracker(store, tmp_path)
    tracker.pipeline_run("p", {"a": 1})
    tracker.pipeline_run("p", {"a": 2})  # MLflow never changes a parameter
    tracker.finish("p")
    run = held(tracker.uri)["pipeline p"]
    assert (run["status"], run["params"]) == ("FINISHED", {"a": "1"})
    (refused,) = Spool(tmp_path).refused()
    assert '"a":"2"' in refused.read_text(encoding="utf-8")


def test_secrets_never_reach_the_spool(tmp_path: Path, closed: str) -> None:
    record_pipeline(Tracker(closed, tmp_path), "p", tmp_path / "files")
    texts = [path.read_text(encoding="utf-8") for path in Spool(tmp_path).waiting()]
    assert any('"token":"***"' in text for text in texts)
    assert not any("s3cret" in text for text in texts)


def test_pipelines_of_one_process_share_a_store_and_lose_nothing(
    tmp_path: Path, store: str, undisturbed: dict[str, Any]
) -> None:
    names = [f"p{number}" for number in range(3)]
    threads = [
        threading.Thread(target=record_pipeline, args=(Tracker(store, tmp_path), n, tmp_path / n))
        for n in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    Tracker(store, tmp_path).replay()  # those that gave up the lock on a busy machine
    assert not [*Spool(tmp_path).waiting(), *Spool(tmp_path).refused()]
    require_pipelines(held(store), names, undisturbed)


@pytest.mark.full  # eight processes that import MLflow
def test_eight_processes_share_a_store_that_none_has_made_and_lose_nothing(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    names = [f"p{number}" for number in range(8)]
    program = (
        "import sys; from pathlib import Path; from tasks.tracking.tracker import Tracker\n"
        "from support.tracked_runs import record_pipeline\n"
        "root, uri, name = Path(sys.argv[1]), *sys.argv[2:]\n"
        "record_pipeline(Tracker(uri, root), name, root / name)\n"
    )
    paths = os.pathsep.join(map(str, (CHECKOUT, CHECKOUT / "tests")))
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), uri, name],
            env={**os.environ, "PYTHONPATH": paths},
        )
        for name in names
    ]
    assert [process.wait(timeout=280) for process in started] == [0] * 8
    Tracker(uri, tmp_path).replay()  # those that gave up the lock on a busy machine
    require_pipelines(held(uri), names, undisturbed)


def test_the_command_writes_what_waits(
    tmp_path: Path,
    store: str,
    closed: str,
    undisturbed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record_pipeline(Tracker(closed, tmp_path), "p", tmp_path / "files")
    monkeypatch.setenv("UMIM_ROOT", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", closed)
    refused = CliRunner().invoke(app, ["replay"])
    assert isinstance(refused.exception, TrackingError)
    assert "MLflow must take what waits; got 13 records" in str(refused.exception)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    done = CliRunner().invoke(app, ["replay"])
    assert (done.exit_code, done.stdout) == (0, "MLflow has everything\n")
    assert held(store) == undisturbed


def test_a_store_without_a_server_names_the_command_that_shows_it(
    tmp_path: Path, store: str
) -> None:
    uri = f"sqlite:///{shutil.copy(store.removeprefix('sqlite:///'), tmp_path / 'my store.db')}"
    tracker = Tracker(uri, tmp_path)
    tracker.pipeline_run("p", {})
    pages = tracker.pages("p")
    assert pages is not None
    assert pages.command == f"mlflow ui --backend-store-uri '{uri}'"
    assert pages.links() == {}
    assert pages.line().startswith(f"{pages.command}, then http://127.0.0.1:5000/#/experiments/")


@pytest.mark.parametrize("accuracy", [["accuracy_umim"], []], ids=["a task", "no task"])
def test_the_comparison_is_shown_without_a_click(
    accuracy: list[str], tmp_path: Path, store: str
) -> None:
    shown = ["token_reduction", "top1", "kl", *accuracy]
    tracker = Tracker(store, tmp_path)
    record_pipeline(tracker, "p", tmp_path / "files")
    for number, metrics in enumerate((shown, ["ppl_half_umim"])):  # the second: a baseline's
        values = dict.fromkeys(metrics, 0.5)
        tracker.comparison_run(f"row-{number}", {"tau": 5}, values, name="a row", pipeline="p")
    pages = tracker.pages("p")
    assert pages is not None
    name = pages.compare.partition("viewStateShareKey=")[2]
    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("umim")
    assert experiment is not None
    state = json.loads(experiment.tags[f"mlflow.sharedViewState.{name}"])
    (chart,) = state["compareRunCharts"]
    assert chart["selectedParams"] == ["recipe", "model", "tau", "setting", "method", "form"]
    assert "params.`kind`" in state["selectedColumns"]
    assert chart["selectedMetrics"] == shown
    assert set(chart["selectedMetrics"]) <= set(COMPARISON_METRICS)
    point = {"token_reduction": 0.1, "difference": 0.0}
    tags = {SOURCE_TAG: ADAPTATION_SOURCE}
    tracker.comparison_run("point", {"task": "t"}, point, name="a point", pipeline="p", tags=tags)
    found = client.search_runs([experiment.experiment_id], state["searchFilter"])
    assert {run.info.run_name for run in found} == {"p-row", "a row"}
