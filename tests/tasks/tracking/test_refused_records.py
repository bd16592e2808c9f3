"""Records that the store will never take are set aside and named; others wait."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from flows.cli import app
from support.tracked_runs import held
from tasks.tracking.spool import SPOOL
from tasks.tracking.tracker import Tracker


@pytest.mark.parametrize(
    "text", ["[]", "3", '{"kind": []}', '{"kind": "points", "pipeline": "p", "time_ms": 0}']
)
def test_a_record_without_its_fields_is_set_aside(tmp_path: Path, store: str, text: str) -> None:
    (tmp_path / SPOOL).mkdir()
    (tmp_path / SPOOL / "0-odd.json").write_text(text)
    tracker = Tracker(store, tmp_path)
    assert not tracker.replay()[0]
    assert [path.name for path in tracker.refused()] == ["0-odd.refused"]


def test_refused_records_are_named_at_the_end_of_a_run_and_by_the_command(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / SPOOL).mkdir()
    (tmp_path / SPOOL / "0-odd.refused").write_text("[]")
    line = f"1 records were refused, see {tmp_path / SPOOL}"
    with caplog.at_level(logging.WARNING, "umim.tracking"):
        Tracker(store, tmp_path).finish("p")
    assert line in caplog.messages
    monkeypatch.setenv("UMIM_ROOT", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    assert CliRunner().invoke(app, ["replay"]).stdout == f"{line}\n"


def test_records_wait_while_the_experiment_is_deleted(tmp_path: Path, store: str) -> None:
    tracker = Tracker(store, tmp_path)
    tracker.pipeline_run("p", {})
    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("umim")
    assert experiment is not None
    client.delete_experiment(experiment.experiment_id)
    tracker.pipeline_run("q", {})
    assert not tracker.refused()
    client.restore_experiment(experiment.experiment_id)
    assert not tracker.replay()[0]
    assert held(tracker.uri)["pipeline q"]["status"] == "RUNNING"
