from __future__ import annotations

import time
from pathlib import Path

import pytest

from umim_core.progress import Points, followed, leave_note, listening


def wait_for(heard: list[Points], count: int) -> None:
    deadline = time.monotonic() + 120
    while len(heard) < count and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(heard) == count


def test_a_listener_hears_the_first_points_at_once_and_the_last_at_the_end(tmp_path: Path) -> None:
    heard: list[Points] = []
    with listening(heard.append), followed(tmp_path):
        leave_note(tmp_path, 1, 3, "training", {"loss": (1, 2.0)})
        wait_for(heard, 1)
        leave_note(tmp_path, 2, 3, "training", {"loss": (2, 1.5), "valid": (2, 1.8)})
        leave_note(tmp_path, 3, 3, "training", {"loss": (3, 1.0), "valid": (2, 1.8)})
    assert heard == [{"loss": (1, 2.0)}, {"loss": (3, 1.0), "valid": (2, 1.8)}]


def test_a_log_file_hears_of_the_first_step_while_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "umim.progress")
    leave_note(tmp_path, 7, 9, "of the attempt before")
    heard: list[Points] = []
    with listening(heard.append), followed(tmp_path):
        leave_note(tmp_path, 1, 3, "training, loss 2.000", {"loss": (1, 2.0)})
        wait_for(heard, 1)
        assert caplog.messages == ["training, loss 2.000: 1 of 3"]


def test_a_point_is_heard_once(tmp_path: Path) -> None:
    heard: list[Points] = []
    with listening(heard.append), followed(tmp_path):
        leave_note(tmp_path, 1, 3, "training", {"valid": (1, 1.8)})
        wait_for(heard, 1)
        leave_note(tmp_path, 2, 3, "training", {"valid": (1, 1.8), "loss": (2, 1.5)})
    assert heard == [{"valid": (1, 1.8)}, {"loss": (2, 1.5)}]
