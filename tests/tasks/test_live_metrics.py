"""Numbers of a stage under way reach the run of its pipeline, and harm nothing when they cannot."""

from __future__ import annotations

import socket
from pathlib import Path

from mlflow import MlflowClient

from tasks.tracker import LiveMetrics, Tracker


def test_numbers_of_a_stage_under_way_are_points_of_its_pipeline(
    tmp_path: Path,
) -> None:
    tracker = Tracker(uri=f"sqlite:///{tmp_path / 'mlflow.db'}", root=tmp_path)
    client = MlflowClient(tracking_uri=tracker.uri)
    run_id = tracker.pipeline_run("p-live", {"recipe": "tiny"})
    live = LiveMetrics(tracker, run_id, "distill a-model \u03c4 5 greedy+drop")
    live({"train_loss": (3, 2.5), "lr": (3, 1e-3)})
    live({"train_loss": (7, 2.25), "valid_kl": (6, float("nan"))})
    name = "live/distill a-model \u03c4 5 greedy drop/train_loss"
    points = [(point.step, point.value) for point in client.get_metric_history(run_id, name)]
    assert points == [(3, 2.5), (7, 2.25)]
    assert {metric.split("/")[-1] for metric in client.get_run(run_id).data.metrics} == {
        "train_loss",
        "lr",
    }


def test_a_store_that_is_away_ends_live_numbers_and_nothing_else(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        tracker = Tracker(f"http://127.0.0.1:{closed.getsockname()[1]}", tmp_path)
        live = LiveMetrics(tracker, "run", "distill")
        live({"train_loss": (1, 1.0)})
        live({"train_loss": (2, 1.0)})
    assert live._lost
    assert tracker._store._away is None
