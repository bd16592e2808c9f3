"""Progress of a run: what a listener hears, and the lines of a log."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from umim_core.progress import (
    Points,
    ProgressLines,
    duration,
    followed,
    leave_note,
    listening,
    warn_once,
)


def wait_for(heard: list[Points], count: int) -> None:
    deadline = time.monotonic() + 120
    while len(heard) < count and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(heard) == count


def test_a_listener_hears_the_first_points_at_once_and_the_last_once_at_the_end(
    tmp_path: Path,
) -> None:
    heard: list[Points] = []
    with listening(heard.append), followed(tmp_path):
        leave_note(tmp_path, 1, 3, "training", {"loss": (1, 2.0), "kl": (1, 0.5)})
        wait_for(heard, 1)
        leave_note(tmp_path, 2, 3, "training", {"loss": (2, 1.5), "valid": (2, 1.8)})
        last = {"loss": (3, 1.0), "kl": (1, 0.5), "valid": (2, 1.8)}
        leave_note(tmp_path, 3, 3, "training", last)
    assert heard == [
        {"loss": (1, 2.0), "kl": (1, 0.5)},
        {"loss": (3, 1.0), "valid": (2, 1.8)},
    ]


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


def test_a_warning_is_logged_once_whoever_comes_to_it(caplog: pytest.LogCaptureFixture) -> None:
    for line in ("50 % of a", "b", "50 % of a"):
        for name in ("umim.one", "umim.two"):
            warn_once(logging.getLogger(name), line)
    assert caplog.messages == ["50 % of a"] * 2 + ["b"] * 2


# Lines


def test_the_worked_example_has_step_loss_rate_and_time_left() -> None:
    lines = ProgressLines(iter((0.0, 10.0)).__next__)
    assert lines.see(5, 100, "training, loss 3.210") == "training, loss 3.210: 5 of 100"
    told = lines.see(25, 100, "training, loss 2.900")
    assert told == "training, loss 2.900: 25 of 100, 2.00/s, 38 s left"


def test_an_hour_of_steps_is_told_at_once_after_ten_seconds_and_once_a_minute() -> None:
    lines = ProgressLines(map(float, range(3600)).__next__)
    told = [second for second in range(3600) if lines.see(second, 7200, "training") is not None]
    assert told == [0, *range(10, 3600, 60)]


def test_another_total_begins_another_rate_but_not_more_lines() -> None:
    lines = ProgressLines(iter((0.0, 4.0, 14.0)).__next__)
    assert lines.see(1, 2, "pairs") == "pairs: 1 of 2"
    assert lines.see(500, 10_000, "triples") is None
    assert lines.see(3500, 10_000, "triples") == "triples: 3,500 of 10,000, 300/s, 22 s left"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(45, "45 s"), (700, "12 min"), (5400, "1 h 30 min"), (12_000, "3 h 20 min")],
)
def test_times_are_told_as_people_tell_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
