"""A prediction for people, and its one refusal."""

from __future__ import annotations

import pytest

from umim_core.cost.prediction import GIB, Limits, Prediction
from umim_core.errors import ResourceLimitError


def told(memory: float = 1.0, disk: float = 1.0, hours: float = 1.0, **more: object) -> Prediction:
    return Prediction(
        work="mining",
        basis="1,234,567 tokens",
        remedy="Raise tau.",
        memory_bytes=memory * GIB,
        disk_bytes=disk * GIB,
        seconds={"tokenize": hours * 1800, "count_2": hours * 1800},
        **more,
    )


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(memory=1.5), r"mining must take at most 1\.5 GiB of memory; got 2 GiB predicted"),
        (Limits(disk=1.5), r"mining must take at most 1\.5 GiB of disk; got 3 GiB predicted"),
        (Limits(time=1.5), r"mining must take at most 1\.5 hours of time; got 4 hours predicted"),
        (Limits(1.0, 1.0, 1.0), "GiB of memory"),
    ],
)
def test_a_prediction_beyond_a_limit_is_refused(limits: Limits, message: str) -> None:
    with pytest.raises(ResourceLimitError, match=message) as caught:
        told(2, 3, 4, limits=limits).check()
    assert "predicted for 1,234,567 tokens. Raise tau." in str(caught.value)


def test_a_prediction_at_its_limits_passes() -> None:
    told(2, 3, 4, limits=Limits(2, 3, 4)).check()
    told(1e9, 1e9, 1e9).check()


def test_lines_show_what_is_known_and_the_limit_of_memory() -> None:
    assert told(2, 3, 4, limits=Limits(1.5), holder="GPU", notes={"assumed": "much"}).lines() == [
        "  for                   1,234,567 tokens",
        "  memory of a GPU       2.00 GiB of 1.5, does not fit",
        "  disk                  3.00 GiB",
        "  time, tokenize        2.0 h",
        "  time, count 2         2.0 h",
        "  time, all             4.0 h",
        "  assumed               much",
    ]
    parts = {"weights": 0.5 * GIB}
    assert told(2, 3, 4, memory_parts=parts).lines()[1:4] == [
        "  memory of a process   2.00 GiB",
        "    weights             0.50 GiB",
        "  disk                  3.00 GiB",
    ]
    assert told(0, 0, 0.01).lines()[1:] == [
        "  time, tokenize        18.0 s",
        "  time, count 2         18.0 s",
        "  time, all             36.0 s",
    ]
