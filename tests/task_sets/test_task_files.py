"""Data files of tasks: errors name file and line; the folder and who may name it."""

from __future__ import annotations

from pathlib import Path

import pytest

from umim_core.errors import ConfigError, CorpusError
from umim_core.task_sets.task_files import read_objects, refuse_data_variable, task_folder


@pytest.mark.parametrize("line", ["{", "[1]", "1" * 5000])
def test_a_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"a": 1}}\n\n{line}\n', encoding="utf-8")
    with pytest.raises(CorpusError, match=r"rows.jsonl:3 must be one JSON object"):
        list(read_objects(path))


def test_an_option_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UMIM_TASK_DATA", raising=False)
    assert task_folder(None) is None
    monkeypatch.setenv("UMIM_TASK_DATA", "there")
    assert (task_folder(None), task_folder("here")) == (Path("there"), Path("here"))


def test_data_from_the_environment_is_refused_where_a_recipe_says_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("UMIM_TASK_DATA", raising=False)
    refuse_data_variable()
    monkeypatch.setenv("UMIM_TASK_DATA", "there")
    with pytest.raises(ConfigError, match=r"UMIM_TASK_DATA must not be set.*got there"):
        refuse_data_variable()
