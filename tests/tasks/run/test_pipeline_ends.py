from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import pytest

from support.servers import free_port
from support.tracked_runs import runs_of
from tasks.run.pipeline import open_pipeline
from umim_core.errors import CorpusError


@pytest.fixture(autouse=True)
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMIM_ROOT", str(tmp_path / "root"))


class Stopped(BaseException):
    """What Prefect's signals and Ctrl-C are: no ordinary error."""


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, "FINISHED"), (CorpusError("no text"), "FAILED"), (Stopped(), "KILLED")],
)
def test_a_run_that_was_stopped_is_told_from_one_that_failed(
    error: BaseException | None,
    status: str,
    monkeypatch: pytest.MonkeyPatch,
    store: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    caplog.set_level(logging.INFO, "umim.pipeline")
    with suppress(CorpusError, Stopped), open_pipeline("embedded", "umim"):
        if error is not None:
            raise error
    (run,) = runs_of(store)
    assert run.info.status == status
    told = f"MLflow: mlflow ui --backend-store-uri {store}, then http" in caplog.text
    assert told is (error is None), "a finished run says where the comparison is"


def test_a_run_without_a_server_keeps_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(CorpusError), open_pipeline("embedded", "umim"):
        raise CorpusError("a corpus must have text")
