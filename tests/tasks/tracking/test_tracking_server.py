"""Real MLflow servers that hang, die or are shared: the same run again completes it, once."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from flows.cli import app
from support.harness_files import PROMPT, write_results
from support.postgres import postgres
from support.servers import free_port
from support.tracked_runs import STAGES, of_run, record_pipeline, record_stage, runs_of
from tasks.run.services import down, local_services, up
from tasks.tracking.harness_results import find_results
from tasks.tracking.tracker import Tracker, fit_name, flatten

pytestmark = pytest.mark.full  # a server takes up to half a minute to start
Pause = Callable[[], Callable[[], object]]  # ends or holds what is behind a server; undone by that


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Pause]]:
    """An MLflow server, and what disturbs it: a stop of the process, or the end of Postgres."""
    folder = tmp_path_factory.mktemp("server")
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        if request.param == "postgres":
            database = stack.enter_context(postgres())
            database.execute("CREATE DATABASE mlflow")
            address = database.url("postgresql+psycopg2", "mlflow")
            patch.setenv("MLFLOW_BACKEND_STORE_URI", address)
        mlflow = local_services(folder, free_port(), free_port())[1]
        stack.callback(down, folder, [mlflow])
        (state,) = up(folder, [mlflow])
        group = state.pid
        assert mlflow.url and group

        def disturb() -> Callable[[], object]:
            if request.param == "postgres":
                database.kill()
                return database.start
            os.killpg(group, signal.SIGSTOP)
            return lambda: os.killpg(group, signal.SIGCONT)

        yield mlflow.url, disturb


def test_a_run_that_is_disturbed_is_there_once_and_whole_when_repeated(
    server: tuple[str, Pause], tmp_path: Path
) -> None:
    uri, disturb = server
    record_pipeline(Tracker(uri, tmp_path), "plain", tmp_path / "files")
    plain = of_run(uri, "plain")
    assert len(plain) == len(STAGES) + 2
    client = MlflowClient(uri, uri)
    assert client.get_model_version_by_alias("umim", "model-plain").tags["umim.backbone"]
    disturbed = Tracker(uri, tmp_path)
    disturbed.pipeline_run("hangs", {"recipe": "tiny", "token": "s3cret"}, name="tiny")
    record_stage(disturbed, "hangs", STAGES[0], tmp_path / "files")
    undo, began = disturb(), time.monotonic()
    try:
        for stage in STAGES[1:3]:
            record_stage(disturbed, "hangs", stage, tmp_path / "files")
        assert time.monotonic() - began < 40  # of Postgres the server itself says no
    finally:
        undo()
    for _ in range(2):
        record_pipeline(Tracker(uri, tmp_path), "hangs", tmp_path / "files")
        assert of_run(uri, "hangs") == plain


def test_results_of_lm_eval_are_one_run_that_a_second_call_leaves_alone(
    server: tuple[str, Pause], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, _ = server
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("UMIM_ROOT", str(tmp_path / "root"))
    command = ["log-lm-eval", str(write_results(tmp_path / "results")), "--json"]

    def logged() -> dict[str, str]:
        printed = CliRunner().invoke(app, command)
        assert printed.exit_code == 0, printed.exception
        (row,) = json.loads(printed.stdout)["runs"]
        return dict(row)

    client = MlflowClient(uri)
    client.update_run(logged()["run_id"], "RUNNING")  # as a kill before the last call leaves it
    again = logged()
    assert again["new"] and logged() == again | {"new": False}
    run = client.get_run(again["run_id"])
    assert [one.info.run_id for one in runs_of(uri, "harness")] == [run.info.run_id]
    (results,) = find_results(tmp_path / "results")
    assert run.data.metrics == {fit_name(n): value for n, value in results.metrics().items()}
    assert run.data.params == flatten(results.params()) and run.info.status == "FINISHED"
    kept = [client.list_artifacts(run.info.run_id, folder) for folder in (None, "samples")]
    assert {"samples/tiny.json", results.path.name} <= {
        file.path for files in kept for file in files
    }
    table = client.load_table(again["experiment_id"], "samples/tiny.json", [run.info.run_id])
    assert table["prompt"].tolist() == [PROMPT, PROMPT]
