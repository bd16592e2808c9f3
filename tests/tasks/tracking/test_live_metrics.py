"""Numbers of a stage under way reach the run of its pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.tracked_runs import held
from tasks.tracking.tracker import LiveMetrics, Tracker


def test_numbers_of_a_stage_under_way_are_points_of_its_pipeline(
    tmp_path: Path, store: str
) -> None:
    tracker = Tracker(store, tmp_path)
    tracker.pipeline_run("p-live", {"recipe": "tiny"})
    live = LiveMetrics(tracker, "p-live", "distill a-model \u03c4 5 greedy+drop")
    live({"train_loss": (3, 2.5), "lr": (3, 1e-3)})
    live({"train_loss": (7, 2.25), "valid_kl": (6, float("nan"))})
    name = "live/distill a-model \u03c4 5 greedy drop"
    assert held(store)["pipeline p-live"]["points"] == {
        f"{name}/train_loss": [[3, 2.5], [7, 2.25]],
        f"{name}/lr": [[3, 1e-3]],
    }


def test_a_full_disk_costs_live_numbers_and_not_the_stage(
    tmp_path: Path, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "root").write_text("no folder")
    LiveMetrics(Tracker(store, tmp_path / "root"), "p", "distill")({"train_loss": (1, 1.0)})
    assert "live numbers are lost" in caplog.text
