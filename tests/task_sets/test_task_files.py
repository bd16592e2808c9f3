"""Data files of tasks: rows by their columns, and errors that name file, line and remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from umim_core.errors import ConfigError, CorpusError
from umim_core.task_sets.task_files import (
    DataFile,
    HubTable,
    read_rows,
    refuse_data_variable,
    task_folder,
)

FILE = DataFile("set/rows.jsonl", ("text", "query"), "answer", "rows of a test")
ROW = {"id": "a", "text": "long", "query": "why", "answer": "so", "other": 1}


def put(folder: Path, *lines: object) -> Path:
    (folder / "set").mkdir()
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "set" / "rows.jsonl").write_text(text + "\n", encoding="utf-8")
    return folder


def test_rows_hold_id_fields_and_references(tmp_path: Path) -> None:
    unnamed = {name: value for name, value in ROW.items() if name != "id"}
    folder = put(tmp_path, ROW, "", unnamed | {"answer": ["so", "thus"]})
    assert list(read_rows(FILE, folder)) == [
        {"id": "a", "text": "long", "query": "why", "references": ["so"]},
        {"id": "3", "text": "long", "query": "why", "references": ["so", "thus"]},
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            {"id": "a", "text": "long", "answer": "so"},
            r"the columns .*rows.jsonl:2: query is",
        ),
        (ROW | {"text": 3}, "text is int"),
        (ROW | {"answer": []}, "answer is list"),
        ("{", "rows.jsonl:2 must be one JSON object"),
        ("[1]", "rows.jsonl:2 must be one JSON object"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        list(read_rows(FILE, put(tmp_path, ROW, line)))


def test_a_missing_file_is_named_with_its_content(tmp_path: Path) -> None:
    message = r"UMIM_TASK_DATA.* must hold set/rows.jsonl; got no file .*rows of a test"
    with pytest.raises(CorpusError, match=message):
        list(read_rows(FILE, tmp_path))


def test_without_a_folder_a_file_that_the_hub_lacks_is_asked_for() -> None:
    with pytest.raises(CorpusError, match=r"set/rows.jsonl must be at hand.*UMIM_TASK_DATA=FOLDER"):
        list(read_rows(FILE, None))


@pytest.mark.full
def test_without_a_folder_the_table_of_the_hub_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local folder whose relative path equals a repository's stands in for it."""
    (tmp_path / "owner" / "table").mkdir(parents=True)
    line = json.dumps({"text": "long", "question": "why", "answer": "so"})
    (tmp_path / "owner" / "table" / "test.jsonl").write_text(line + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    hub = HubTable("owner/table", "test", columns={"query": "question"})
    file = DataFile("rows.jsonl", ("text", "query"), "answer", "rows", hub=hub)
    (row,) = read_rows(file, None)
    assert row == {"id": "0", "text": "long", "query": "why", "references": ["so"]}


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
