"""A real MLflow server that hangs or is shared: the same run again completes it, nothing twice."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from flows.cli import app
from support.harness_files import PROMPT, write_results
from support.servers import free_port
from support.tracked_runs import STAGES, of_run, record_end, record_pipeline, record_stage
from tasks.run.services import down, local_services, up
from tasks.tracking.harness_results import find_results
from tasks.tracking.tracker import Tracker

pytestmark = pytest.mark.full  # the server takes up to half a minute to start


@dataclass(frozen=True)
class Server:
    """One store behind one port, and the process group of the server."""

    uri: str
    port: int
    group: int


class Proxy(ThreadingHTTPServer):
    """Hands requests on to a server on loopback, files (PUT) after a delay."""

    def __init__(self, port: int, seconds: float) -> None:
        super().__init__(("127.0.0.1", 0), Forwarding)
        self.port, self.seconds = port, seconds
        self.uri = f"http://127.0.0.1:{self.server_address[1]}"
        self.methods: list[str] = []  # of requests that write, and of uploads


class Forwarding(BaseHTTPRequestHandler):
    server: Proxy

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.command == "PUT" or self.path.endswith("/log-batch"):
            self.server.methods.append(self.command)
        if self.command == "PUT":
            time.sleep(self.server.seconds)
        behind = http.client.HTTPConnection("127.0.0.1", self.server.port)
        kept = ("Content-Type", "Accept")
        headers = {name: self.headers[name] for name in kept if name in self.headers}
        behind.request(self.command, self.path, body, headers)
        answer = behind.getresponse()
        content = answer.read()
        behind.close()
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.headers.get("Content-Type", "text/plain"))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    mlflow = local_services(folder, free_port(), free_port())[1]
    try:
        (state,) = up(folder, [mlflow])
        assert mlflow.url and mlflow.port and state.pid
        yield Server(mlflow.url, mlflow.port, state.pid)
    finally:
        down(folder, [mlflow])


@pytest.fixture(scope="module")
def undisturbed(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What the server holds of a run that it was there for."""
    base = tmp_path_factory.mktemp("undisturbed")
    record_pipeline(Tracker(server.uri, base), "plain", base / "files")
    return of_run(server.uri, "plain")


def open_pipeline(tracker: Tracker, pipeline: str) -> None:
    tracker.pipeline_run(pipeline, {"recipe": "tiny", "token": "s3cret"}, name="tiny")


def test_two_clients_share_runs_and_checkpoints_over_a_server(
    server: Server, undisturbed: dict[str, object], tmp_path: Path
) -> None:
    assert len(undisturbed) == len(STAGES) + 2
    client = MlflowClient(tracking_uri=server.uri, registry_uri=server.uri)
    assert client.get_model_version_by_alias("umim", "model-plain").tags["umim.backbone"]
    for _ in range(2):
        record_pipeline(Tracker(server.uri, tmp_path), "share", tmp_path / "files")
    again = of_run(server.uri, "share")
    live = "pipeline its-5"  # trained again, so its live numbers are there of both times
    assert again.pop(live)
    assert again == {name: run for name, run in undisturbed.items() if name != live}


@pytest.mark.parametrize("seconds", [6, 30])  # a number may take 5
def test_a_proxy_that_delays_files_gets_everything_numbers_first(
    server: Server,
    undisturbed: dict[str, object],
    tmp_path: Path,
    seconds: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pipeline = f"slow{seconds // 6}"
    with Proxy(server.port, seconds) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        record_pipeline(Tracker(proxy.uri, tmp_path), pipeline, tmp_path / "files")
        proxy.shutdown()
    assert of_run(server.uri, pipeline) == undisturbed
    assert not [line for line in caplog.messages if "MLflow" in line]
    files = proxy.methods.count("PUT")
    assert files == 2 and proxy.methods[-files:] == ["PUT"] * files


def test_a_server_that_hangs_in_mid_run_has_everything_once_the_run_is_repeated(
    server: Server, undisturbed: dict[str, object], tmp_path: Path
) -> None:
    tracker = Tracker(server.uri, tmp_path)
    open_pipeline(tracker, "hangs")
    record_stage(tracker, "hangs", STAGES[0])
    os.killpg(server.group, signal.SIGSTOP)
    try:
        began = time.monotonic()
        for stage in STAGES[1:3]:
            record_stage(tracker, "hangs", stage)
        assert time.monotonic() - began < 10
    finally:
        os.killpg(server.group, signal.SIGCONT)
    again = Tracker(server.uri, tmp_path)  # as the same command, which finds its stages
    open_pipeline(again, "hangs")
    for stage in STAGES:
        record_stage(again, "hangs", stage)
    record_end(again, "hangs", tmp_path / "files")
    live = "pipeline its-5"  # live numbers are those of both times
    recorded = of_run(server.uri, "hangs")
    assert recorded.pop(live)
    assert recorded == {name: run for name, run in undisturbed.items() if name != live}


def test_results_of_lm_eval_are_one_run_that_a_second_call_leaves_alone(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    monkeypatch.setenv("UMIM_ROOT", str(tmp_path / "root"))
    command = ["log-lm-eval", str(write_results(tmp_path / "results")), "--json"]
    printed = CliRunner().invoke(app, command)
    assert printed.exit_code == 0, printed.exception
    [first] = json.loads(printed.stdout)["runs"]
    client = MlflowClient(tracking_uri=server.uri)
    run_id = first["run_id"]
    client.update_run(run_id, status="RUNNING")  # as a kill before the last call leaves it
    for again in (True, False):
        assert json.loads(CliRunner().invoke(app, command).stdout)["runs"] == [
            first | {"new": again}
        ]
    run = client.get_run(run_id)
    [results] = find_results(tmp_path / "results")
    assert run.data.metrics == results.metrics() and run.data.params == results.params()
    assert run.info.status == "FINISHED"
    files = [*client.list_artifacts(run_id), *client.list_artifacts(run_id, "samples")]
    assert {"samples/tiny.json", results.path.name} <= {file.path for file in files}
    table = client.load_table(first["experiment_id"], "samples/tiny.json", [run_id])
    assert table["prompt"].tolist() == [PROMPT, PROMPT]
