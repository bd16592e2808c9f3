"""A store that is away costs a run seconds at most; the same run again records what it missed."""

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import NoCredentialsError
from mlflow import MlflowClient

from support.busy_machine import within
from support.tracked_runs import held, record_pipeline
from tasks.report.comparison import COMPARISON_METRICS
from tasks.tracking.compare_view import ADAPTATION_SOURCE, SOURCE_TAG
from tasks.tracking.mlflow_store import Store, StoreAwayError
from tasks.tracking.tracker import Tracker

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> dict[str, Any]:
    """What a store holds of a run that it was there for."""
    base = tmp_path_factory.mktemp("undisturbed")
    copy = shutil.copy(empty_store, base / "mlflow.db")
    tracker = Tracker(f"sqlite:///{copy}", base)
    record_pipeline(tracker, "p", base / "files")
    return held(tracker.uri)


def lost(store: dict[str, Any], names: list[str], undisturbed: dict[str, Any]) -> list[str]:
    """Return what a store lacks, or has too much, of several pipelines that are each as one."""
    wanted = len(names) * (len(undisturbed) - 1) + 1
    differing = [] if len(store) == wanted else [f"{len(store)} runs, not {wanted}"]
    for run in undisturbed:
        if run.startswith(("pipeline", "stage")):
            whole = {part: undisturbed[run][part] for part in ("points", "files")}
            whole["status"] = "FINISHED"
            twins = [run.replace(" p", f" {name}", 1) for name in names]
            differing += [
                f"{part} of {twin}"
                for twin in twins
                for part, value in whole.items()
                if store[twin][part] != value
            ]
    return differing


@pytest.fixture
def closed() -> Iterator[str]:
    """The address of a server that is not there."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def test_a_run_without_a_server_ends_well_and_the_same_run_again_is_recorded(
    tmp_path: Path,
    store: str,
    closed: str,
    undisturbed: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "umim.tracking"):
        record_pipeline(Tracker(closed, tmp_path), "p", tmp_path / "files")
    away, missed = (record.getMessage() for record in caplog.records)
    assert away.startswith("MLflow is away, the run goes on")
    assert missed.startswith("MLflow lacks a part of this run")
    record_pipeline(Tracker(store, tmp_path), "p", tmp_path / "files")
    assert held(store) == undisturbed


def test_files_that_were_not_sent_are_sent_when_their_stage_is_found(
    tmp_path: Path, store: str
) -> None:
    note = tmp_path / "note.txt"
    note.write_text("hello")
    for number in range(2):  # the first time the process ends before its files are sent
        tracker = Tracker(store, tmp_path)
        tracker.stage_run("p", "corpus", "c", {}, {}, artifacts=[note])
        if number:
            tracker.finish("p")
    client = MlflowClient(store)
    (experiment,) = client.search_experiments(filter_string="name = 'umim'")
    runs = client.search_runs([experiment.experiment_id], "tags.`umim.kind` = 'stage'")
    assert [file.path for file in client.list_artifacts(runs[0].info.run_id)] == ["note.txt"]


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
        with ThreadPoolExecutor(1) as pool:
            finishing = pool.submit(tracker.finish, "p", "KILLED")
            assert within(4, finishing.done, os.getpid())
            finishing.result()


def test_a_record_that_the_store_refuses_lets_the_others_pass(
    tmp_path: Path, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracker(store, tmp_path)
    tracker.pipeline_run("p", {"a": 1})
    tracker.pipeline_run("p", {"a": 2})  # MLflow never changes a parameter
    tracker.attach("p", [tmp_path / "absent.txt"])
    tracker.finish("p")
    run = held(tracker.uri)["pipeline p"]
    assert (run["status"], run["params"]) == ("FINISHED", {"a": "1"})
    assert caplog.text.count("MLflow refuses a record") == 2
    assert "absent.txt" in caplog.text


def test_a_deleted_experiment_is_a_store_that_is_away(tmp_path: Path, store: str) -> None:
    tracker = Tracker(store, tmp_path)
    tracker.pipeline_run("p", {})
    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("umim")
    assert experiment is not None
    client.delete_experiment(experiment.experiment_id)
    Tracker(store, tmp_path).pipeline_run("q", {})
    client.restore_experiment(experiment.experiment_id)
    assert "pipeline q" not in held(store)


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
    assert lost(held(store), names, undisturbed) == []


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
    assert lost(held(uri), names, undisturbed) == []


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
    assert chart["selectedParams"] == ["recipe", "model", "tau", "setting", "method", "kind"]
    assert "params.`form`" in state["selectedColumns"]
    assert chart["selectedMetrics"] == shown
    assert set(chart["selectedMetrics"]) <= set(COMPARISON_METRICS)
    point = {"token_reduction": 0.1, "difference": 0.0}
    tags = {SOURCE_TAG: ADAPTATION_SOURCE}
    tracker.comparison_run("point", {"task": "t"}, point, name="a point", pipeline="p", tags=tags)
    found = client.search_runs([experiment.experiment_id], state["searchFilter"])
    assert {run.info.run_name for run in found} == {"p-row", "a row"}


def test_an_artifact_store_that_refuses_is_a_store_that_is_away(tmp_path: Path, store: str) -> None:
    def refusing(*_: object) -> None:
        raise NoCredentialsError

    with (
        pytest.raises(StoreAwayError, match="must answer"),
        Store(store, tmp_path).session(60, 1, 1) as opened,
    ):
        run = opened.ensure("stage", "k" * 64, "count", {}, time_ms=1)
        opened._client.log_artifact = refusing
        opened._client.log_artifact(run.run_id, "file")
