"""Options of generation tasks: taken out of lm-eval's metadata, refused where out of bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from umim_core.errors import ConfigError, CorpusError
from umim_core.task_sets.task_options import TaskOptions


def test_options_are_taken_from_among_the_arguments_of_the_model() -> None:
    metadata = {"checkpoint": "x", "version": 1.0, "task_seed": 3, "task_new_tokens": 64}
    metadata |= {"task_data": "data", "task_features": "of another task"}
    assert TaskOptions.read(metadata) == TaskOptions(task_seed=3, task_new_tokens=64)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"task_sed": 1}, "must be one of task_filler, .*; got task_sed. Did you mean 'task_seed'"),
        ({"task_seed": -1}, "task_seed must be a whole number of at least 0; got -1"),
        ({"task_questions": 0}, "at least 1; got 0"),
        ({"task_questions": "4k"}, "at least 1; got 4k"),
        ({"task_new_tokens": True}, "at least 1; got True"),
        ({"task_filler": 3}, "task_filler must be a path; got 3"),
    ],
)
def test_an_option_out_of_bounds_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TaskOptions.read(given)


def test_filler_is_the_sentences_of_all_text_files(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("Three?\n", encoding="utf-8")
    (tmp_path / "a.txt").write_text("One is\nhere. Two!", encoding="utf-8")
    (tmp_path / "c.md").write_text("Four.", encoding="utf-8")
    assert TaskOptions(task_filler=str(tmp_path)).filler() == ["One is here.", "Two!", "Three?"]
    assert TaskOptions().filler() is None


def test_filler_without_sentences_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One is here.", encoding="utf-8")
    with pytest.raises(CorpusError, match="must hold sentences"):
        TaskOptions(task_filler=str(tmp_path / "a.txt")).filler()
    with pytest.raises(CorpusError, match=r"must name a text file.*FileNotFound"):
        TaskOptions(task_filler=str(tmp_path / "none.txt")).filler()
