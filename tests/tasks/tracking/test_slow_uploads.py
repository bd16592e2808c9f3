"""Files that take their time: numbers never wait behind them, and all land once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from support.tracked_runs import runs_of
from tasks.tracking import tracker as tracker_module
from tasks.tracking.mlflow_store import UPLOAD_SECONDS
from tasks.tracking.tracker import Tracker


class Files(ThreadingHTTPServer):
    """Keeps files that are put, each after a delay; the first ``failing`` of a name get no answer.

    Of those, the connection is closed at once, or by the client where the server is ``silent``.
    MLflow's own client sends to it: it is the artifact location of the experiment.
    """

    def __init__(self, seconds: float, silent: bool, failing: dict[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seconds, self.silent, self.failing = seconds, silent, failing
        self.asked: list[str] = []
        self.kept: dict[str, bytes] = {}


class Handler(BaseHTTPRequestHandler):
    server: Files

    def do_PUT(self) -> None:
        name = self.path.rpartition("/")[2]
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append(name)
        if self.server.failing.get(name, 0):
            self.server.failing[name] -= 1
            if self.server.silent:
                self.rfile.read(1)
            self.close_connection = True
            return
        time.sleep(self.server.seconds)
        self.server.kept[name] = content
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def files_of(
    store: str, seconds: float = 0.0, *, silent: bool = False, **failing: int
) -> Iterator[Files]:
    """Let a new store's experiment keep its files on a server of this process."""
    server = Files(seconds, silent, failing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        place = f"http://127.0.0.1:{server.server_address[1]}/files"
        MlflowClient(store).create_experiment("umim", place)
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path in paths:
        path.write_text(f"content of {path.name}")
    return paths


@pytest.mark.full
@pytest.mark.parametrize("seconds", [6, 30])  # a number may take 5
def test_a_file_that_takes_longer_than_a_number_may_lands_at_the_first_try(
    tmp_path: Path, store: str, files: list[Path], seconds: int
) -> None:
    with files_of(store, seconds) as server:
        tracker = Tracker(store, tmp_path / "root")
        tracker.pipeline_run("p", {})
        tracker.attach("p", files[:1])
        tracker.points("p", [("live/loss", 1, 0.5)])
        assert only_run(store).data.metrics == {"live/loss": 0.5}
        assert server.asked == []
        tracker.finish("p")
        assert server.asked == ["a"] and server.kept == {"a": b"content of a"}
    assert only_run(store).info.status == "FINISHED"


def only_run(store: str) -> Run:
    (run,) = runs_of(store)
    return run


def send(tracker: Tracker, files: list[Path]) -> None:
    for path in files:
        tracker.attach("p", [path])
    tracker.finish("p")


def test_a_file_that_fails_goes_behind_the_others_and_is_tried_again(
    tmp_path: Path, store: str, files: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    with files_of(store, a=1) as server:
        send(Tracker(store, tmp_path / "root"), files)
        assert server.asked == ["a", "b", "c", "a"]
        assert sorted(server.kept) == ["a", "b", "c"]
    assert only_run(store).info.status == "FINISHED"
    assert "MLflow lacks" not in caplog.text


def test_a_file_that_takes_too_long_costs_the_others_no_patience(
    tmp_path: Path, store: str, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("UPLOAD_SECONDS", "_PATIENCE_SECONDS", "_LOCKED_SECONDS"):
        monkeypatch.setattr(tracker_module, name, 4)
    with files_of(store, silent=True, a=1) as server:
        send(Tracker(store, tmp_path / "root"), files)
        assert server.asked == ["a", "b", "c", "a"]
        assert sorted(server.kept) == ["a", "b", "c"]


def test_files_that_failed_are_named_and_the_same_command_sends_them(
    tmp_path: Path, store: str, files: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    with files_of(store, a=2) as server, caplog.at_level(logging.WARNING, "umim.tracking"):
        send(Tracker(store, tmp_path / "root"), files)
        assert sorted(server.kept) == ["b", "c"]
        assert caplog.messages[-1].startswith("MLflow lacks a part of this run: 0 records, files")
        caplog.clear()
        send(Tracker(store, tmp_path / "root"), files)
        assert sorted(server.kept) == ["a", "b", "c"]
        assert not caplog.messages


def test_a_stopped_run_leaves_its_files_to_the_same_command(
    tmp_path: Path, store: str, files: list[Path]
) -> None:
    with files_of(store) as server:
        for status, kept in (("KILLED", []), ("FINISHED", ["a", "b", "c"])):
            tracker = Tracker(store, tmp_path / "root")
            tracker.attach("p", files)
            tracker.finish("p", status)
            assert sorted(server.kept) == kept


def test_a_folder_of_which_a_part_was_sent_is_completed(tmp_path: Path, store: str) -> None:
    folder = tmp_path / "rules"
    (folder / "deep").mkdir(parents=True)
    for name in ("a", "deep/b", "deep/c"):
        (folder / name).write_text(f"content of {name}")
    for _ in range(2):
        tracker = Tracker(store, tmp_path / "root")
        tracker.stage_run("p", "prune", "key", {}, {}, artifacts=[folder])
        tracker.finish("p")
        [sent] = (tmp_path / "root" / "mlruns").rglob("deep/b")
        assert sent.read_text() == "content of deep/b"
        assert (sent.parent / "c").read_text() == "content of deep/c"
        sent.write_text("cont")  # as a kill in mid-copy leaves it
        (sent.parent / "c").unlink()


def test_a_short_absence_loses_nothing_not_even_live_numbers(
    tmp_path: Path, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = Path(store.removeprefix("sqlite:///"))
    tracker = Tracker(store, tmp_path / "root")
    tracker.pipeline_run("p", {})
    away = place.rename(place.with_suffix(".away"))
    place.mkdir()  # sqlite cannot open it
    tracker = Tracker(store, tmp_path / "root")
    tracker.points("p", [("live/loss", 1, 0.5)])
    tracker.points("p", [("live/loss", 2, 0.25)])
    place.rmdir()
    away.rename(place)
    tracker.finish("p")
    run = only_run(store)
    history = MlflowClient(store).get_metric_history(run.info.run_id, "live/loss")
    assert [(point.step, point.value) for point in history] == [(1, 0.5), (2, 0.25)]
    assert run.info.status == "FINISHED"
    assert "MLflow is away" in caplog.text and "MLflow lacks" not in caplog.text


def test_a_file_may_take_minutes() -> None:
    assert UPLOAD_SECONDS >= 120
