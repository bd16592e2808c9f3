"""End of a pipeline's run in MLflow, as seen from a process that is not the run's own."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tasks.run.pipeline import open_pipeline
from umim_core.errors import CorpusError


class Stopped(BaseException):
    """What Prefect's signals and Ctrl-C are: no ordinary error."""


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, "FINISHED"), (CorpusError("no text"), "FAILED"), (Stopped(), "KILLED")],
)
def test_a_run_that_was_stopped_is_told_from_one_that_failed(
    error: BaseException | None,
    status: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    store: str,
) -> None:
    monkeypatch.setenv("UMIM_ROOT", str(tmp_path / "root"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    with suppress(CorpusError, Stopped), open_pipeline("embedded", "umim"):
        if error is not None:
            raise error
    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("umim")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == status
