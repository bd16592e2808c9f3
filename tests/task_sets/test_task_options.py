"""Options of generation tasks: taken out of lm-eval's metadata, refused where out of bounds."""

from __future__ import annotations

import pytest

from umim_core.errors import ConfigError
from umim_core.task_sets.generation_rows import TaskOptions


def test_options_are_taken_from_among_the_arguments_of_the_model() -> None:
    metadata = {"checkpoint": "x", "version": 1.0, "task_seed": 3, "task_new_tokens": 64}
    metadata |= {"task_data": "data", "task_features": "of another task"}
    assert TaskOptions.read(metadata) == TaskOptions(task_seed=3, task_new_tokens=64)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"task_sed": 1},
            "one of task_new_tokens, .*; got task_sed. Did you mean 'task_seed'",
        ),
        ({"task_questions": 0}, "at least 1; got 0"),
        ({"task_new_tokens": True}, "at least 1; got True"),
    ],
)
def test_an_option_out_of_bounds_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TaskOptions.read(given)
