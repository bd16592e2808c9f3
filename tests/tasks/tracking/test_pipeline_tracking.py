"""Messages about MLflow at the end of a pipeline, with and without a server."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest

from support.tracked_runs import held
from tasks.run.pipeline import open_pipeline
from umim_core.errors import CorpusError


def only_run(store: str) -> dict[str, object]:
    (name,) = (name for name in held(store) if name.startswith("pipeline"))
    run: dict[str, object] = held(store)[name]
    return run


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An artifact root of one's own."""
    monkeypatch.setenv("UMIM_ROOT", str(tmp_path / "root"))
    return tmp_path / "root"


def test_a_finished_run_says_where_the_comparison_is(
    store: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    with caplog.at_level(logging.INFO, "umim.pipeline"), open_pipeline("embedded", "umim"):
        pass
    assert only_run(store)["status"] == "FINISHED"
    assert f"MLflow: mlflow ui --backend-store-uri {store}, then http" in caplog.text


def test_a_run_without_a_server_keeps_its_own_error(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(CorpusError), open_pipeline("embedded", "umim"):
            raise CorpusError("a corpus must have text")
