"""Files that take their time: numbers never wait behind them, and all land once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from tasks.tracking.patience import CALL_SECONDS, UPLOAD_SECONDS, Patience
from tasks.tracking.spool import UPLOADS, Spool
from tasks.tracking.tracker import Tracker


class Files(ThreadingHTTPServer):
    """Keeps files that are put, each after a delay; the first ``failing`` of a name get no answer.

    MLflow's own client sends to it: it is the artifact location of the experiment.
    """

    def __init__(self, seconds: float, failing: dict[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seconds, self.failing = seconds, failing
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
def files_of(store: str, seconds: float = 0.0, **failing: int) -> Iterator[Files]:
    """Let a new store's experiment keep its files on a server of this process."""
    server = Files(seconds, failing)
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
def test_a_file_that_takes_longer_than_a_number_may_lands_at_the_first_try(
    tmp_path: Path, store: str, files: list[Path]
) -> None:
    with files_of(store, CALL_SECONDS + 1) as server:
        tracker = Tracker(store, tmp_path / "root")
        tracker.pipeline_run("p", {})
        tracker.attach("p", files[:1])
        tracker.points("p", [("live/loss", 1, 0.5)])
        assert only_run(store).data.metrics == {"live/loss": 0.5}
        assert server.asked == []
        tracker.finish("p")
        assert server.asked == ["a"] and server.kept == {"a": b"content of a"}
    assert only_run(store).info.status == "FINISHED"
    assert not Spool(tracker.root).all_waiting()


def only_run(store: str) -> Run:
    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("umim")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return run


def test_a_file_that_fails_goes_behind_the_others_and_a_replay_tries_it_again(
    tmp_path: Path, store: str, files: list[Path]
) -> None:
    with files_of(store, a=2) as server:
        tracker = Tracker(store, tmp_path / "root")
        tracker.pipeline_run("p", {})
        for path in files:
            tracker.attach("p", [path])
        tracker.finish("p")
        assert only_run(store).info.status == "FINISHED"
        assert len(Spool(tracker.root).waiting(UPLOADS)) == 3  # one try: others may be as slow
        Tracker(store, tracker.root).finish("p")
        assert sorted(server.kept) == ["b", "c"]
        waiting, _ = Tracker(store, tracker.root).replay()
        assert not waiting
        assert sorted(server.kept) == ["a", "b", "c"]


def test_a_stopped_run_leaves_its_files_to_the_next(
    tmp_path: Path, store: str, files: list[Path]
) -> None:
    with files_of(store) as server:
        tracker = Tracker(store, tmp_path / "root")
        tracker.attach("p", files)
        tracker.finish("p", "KILLED")
        assert server.asked == []
        Tracker(store, tracker.root).finish("q")
        assert sorted(server.kept) == ["a", "b", "c"]


def test_a_replay_is_more_patient_than_a_run_and_asks_again() -> None:
    replay = Patience.of_a_replay()
    assert (replay.limits()[2], replay.retries) == (60, 3)
    assert (Patience().limits()[2], Patience().retries) == (5, 0)
    assert UPLOAD_SECONDS > 30
