"""Secrets of the environment stay there: not in artifacts, pages, logs or MLflow (reliability 45).

That the search finds a secret where there is one is in ``test_traces.py``; that credentials of
addresses and configurations are hidden, in ``tasks/tracking/test_tracking.py``.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from support.tiny_pipeline import Walk
from support.traces import CANARIES, traces
from tasks.tracking.tracker import Tracker

pytestmark = pytest.mark.full  # a whole run is in its fixture

STAGES = ("task", "with-rules", "distill", "evaluate", "report")


def test_secrets_of_the_environment_reach_no_artifact_log_or_tracking_store(
    tiny_run: Walk,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, secret in CANARIES.items():
        monkeypatch.setenv(name, secret)
    caplog.set_level(logging.DEBUG)
    tracker = Tracker(uri=f"sqlite:///{tmp_path / 'mlflow.db'}", root=tmp_path / "root")
    tracker.pipeline_run("run", tiny_run.recipe.model_dump(mode="json"))
    for stage in STAGES:
        call = next(call for call in tiny_run.calls if call.name == stage)
        made = call.run(tmp_path / "root")
        assert made.executed
        manifest = made.manifest()
        parameters = {"config": manifest["config"], "inputs": manifest["inputs"]}
        files = sorted(path for path in made.path.rglob("*") if path.is_file())
        tracker.stage_run("run", stage, made.key, parameters, made.metrics, artifacts=files[:3])
    tracker.finish("run")
    printed = capfd.readouterr()
    (tmp_path / "log").write_text(caplog.text + printed.out + printed.err, encoding="utf-8")
    assert "with-rules: built in" in caplog.text
    assert (tmp_path / "mlflow.db").is_file()
    assert list((tmp_path / "root" / "report").glob("*/report.html"))
    assert traces([tmp_path], CANARIES) == []
