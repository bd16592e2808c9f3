"""MLflow on Postgres, killed in mid-run: the same run again completes it, nothing twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.postgres import postgres
from support.servers import free_port
from support.tracked_runs import STAGES, of_run, record_pipeline, record_stage
from tasks.run.services import down, local_services, up
from tasks.tracking.tracker import Tracker

pytestmark = pytest.mark.full


def test_a_run_that_saw_the_end_of_postgres_is_there_once_and_whole_when_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with postgres() as database:
        database.execute("CREATE DATABASE mlflow")
        address = database.url("postgresql+psycopg2", "mlflow")
        monkeypatch.setenv("MLFLOW_BACKEND_STORE_URI", address)
        mlflow = local_services(tmp_path / "services", free_port(), free_port())[1]
        try:
            up(tmp_path / "services", [mlflow])
            uri = str(mlflow.url)
            record_pipeline(Tracker(uri, tmp_path), "plain", tmp_path / "files")
            disturbed = Tracker(uri, tmp_path)
            disturbed.pipeline_run("kills", {"recipe": "tiny", "token": "s3cret"}, name="tiny")
            record_stage(disturbed, "kills", STAGES[0])
            database.kill()
            record_stage(disturbed, "kills", STAGES[1])
            database.start()
            record_pipeline(Tracker(uri, tmp_path), "kills", tmp_path / "files")
            plain, again = (of_run(uri, pipeline) for pipeline in ("plain", "kills"))
        finally:
            down(tmp_path / "services", [mlflow])
    assert not list((tmp_path / "services").glob("*.db"))
    for recorded in (plain, again):
        assert recorded.pop("pipeline its-5")["status"] == "FINISHED"  # live numbers: both times
    assert again == plain and len(plain) == len(STAGES) + 1
