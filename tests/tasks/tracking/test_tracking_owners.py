"""Two roots or two users on one store: runs of their own, and what is finished stays so."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.tracked_runs import record_pipeline, runs_of
from tasks.cluster.code_identity import code_identity
from tasks.run.pipeline import open_pipeline
from tasks.tracking.tracker import Tracker


def stopped(tracker: Tracker) -> None:
    """A pipeline of the same key that measures a row and is stopped."""
    tracker.pipeline_run("p", {"recipe": "tiny"}, name="tiny")
    tracker.comparison_run("p-row", {"tau": 5}, {"top1": 0.25}, pipeline="p")
    tracker.finish("p", "KILLED")


def test_a_run_of_another_root_leaves_a_finished_one_alone(tmp_path: Path, store: str) -> None:
    record_pipeline(Tracker(store, tmp_path / "hers"), "p", tmp_path / "files")
    stopped(Tracker(store, tmp_path / "his"))
    pipelines = runs_of(store, "pipeline")
    assert sorted(run.info.status for run in pipelines) == ["FINISHED", "KILLED"]
    rows = {
        run.data.tags["umim.pipeline"]: run.data.metrics for run in runs_of(store, "comparison")
    }
    measured = {run.info.status: rows[run.info.run_id]["top1"] for run in pipelines}
    assert measured == {"FINISHED": 0.5, "KILLED": 0.25}


def test_two_users_of_one_root_have_runs_of_their_own(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for user in ("ada", "o'brien"):
        monkeypatch.setenv("LOGNAME", user)
        stopped(Tracker(store, tmp_path))
    for kind in ("pipeline", "comparison"):
        users = {run.data.tags["mlflow.user"] for run in runs_of(store, kind)}
        assert users == {"ada", "o_brien"}


def test_a_finished_run_never_reopens(tmp_path: Path, store: str) -> None:
    tracker = Tracker(store, tmp_path)
    record_pipeline(tracker, "p", tmp_path / "files")
    stopped(tracker)
    (run,) = runs_of(store, "pipeline")
    assert run.info.status == "FINISHED"


def test_a_moved_root_keeps_its_runs(tmp_path: Path, store: str) -> None:
    stopped(Tracker(store, tmp_path / "before"))
    (tmp_path / "before").rename(tmp_path / "after")
    stopped(Tracker(store, tmp_path / "after"))
    assert len(runs_of(store, "pipeline")) == 1


def test_a_run_says_which_code_made_it_and_where(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("UMIM_ROOT", str(tmp_path / "root"))
    with open_pipeline("embedded", "umim"):
        pass
    (run,) = runs_of(store, "pipeline")
    code = code_identity()
    assert len(code.lock) == len(code.sources) == 64
    wanted = {"umim.host": code.host, "umim.lock": code.lock, "umim.sources": code.sources}
    assert wanted.items() <= run.data.tags.items()
    assert run.data.tags["mlflow.source.git.commit"] == code.commit
