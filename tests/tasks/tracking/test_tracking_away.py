"""A store that is away costs a run seconds at most; the same run again records what it missed."""

from __future__ import annotations

import logging
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from support.tracked_runs import held, of_run, record_pipeline, runs_of
from tasks.tracking.tracker import Tracker


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
    tracker.attach("p", [tmp_path / "absent.txt"])
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
