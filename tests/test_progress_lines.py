"""Progress lines in a log file: times and texts."""

from __future__ import annotations

import pytest

from umim_core.progress import ProgressLines, duration


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_worked_example_has_step_loss_rate_and_time_left() -> None:
    clock = Clock()
    lines = ProgressLines(clock)
    assert lines.see(5, 100, "training, loss 3.210") == "training, loss 3.210: 5 of 100"
    clock.now = 10.0
    told = lines.see(25, 100, "training, loss 2.900")
    assert told == "training, loss 2.900: 25 of 100, 2.00/s, 38 s left"


def test_an_hour_of_steps_is_told_at_once_after_ten_seconds_and_once_a_minute() -> None:
    clock = Clock()
    lines = ProgressLines(clock)
    told = []
    for second in range(3600):
        clock.now = float(second)
        if lines.see(second, 7200, "training") is not None:
            told.append(second)
    assert told == [0, *range(10, 3600, 60)]


def test_another_total_begins_another_rate_but_not_more_lines() -> None:
    clock = Clock()
    lines = ProgressLines(clock)
    assert lines.see(1, 2, "pairs") == "pairs: 1 of 2"
    clock.now = 4.0
    assert lines.see(500, 10_000, "triples") is None
    clock.now = 14.0
    assert lines.see(3500, 10_000, "triples") == "triples: 3,500 of 10,000, 300/s, 22 s left"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(45, "45 s"), (700, "12 min"), (5400, "1 h 30 min"), (12_000, "3 h 20 min")],
)
def test_times_are_told_as_people_tell_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
