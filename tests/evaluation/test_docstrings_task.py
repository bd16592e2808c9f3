"""The data and the prompt of the embedded lm-eval task."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from umim_core.adaptation.choices import DOCSTRING_PROMPT
from umim_core.errors import CorpusError
from umim_core.evaluation.multiple_choice import EMBEDDED_TASK, TASK_FOLDER
from umim_core.evaluation.tasks.docstrings import load_splits


def write(folder: Path, splits: tuple[str, ...] = ("train", "valid", "test")) -> Path:
    for split in splits:
        row = {"id": "1", "context": f"body {split}", "choices": ["a", "b"], "gold": 1}
        (folder / f"{split}.jsonl").write_text(json.dumps(row) + "\n", "utf-8")
    return folder


def task_file() -> dict:
    """The YAML without its function reference, which only lm-eval can resolve."""
    text = (TASK_FOLDER / f"{EMBEDDED_TASK}.yaml").read_text("utf-8")
    return yaml.safe_load(text.replace("!function ", ""))


def test_the_folder_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMIM_TASK_DATA", str(write(tmp_path)))
    splits = load_splits(version=1.0, checkpoint="ignored")
    assert splits["test"][0] == {"context": "body test", "choices": ["a", "b"], "gold": 1}
    assert splits["train"][0]["context"] == "body train"


def test_an_argument_wins_over_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMIM_TASK_DATA", str(tmp_path / "nothing"))
    assert len(load_splits(str(write(tmp_path)))["valid"]) == 1


def test_a_missing_folder_or_split_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="UMIM_TASK_DATA must name a folder"):
        load_splits(str(tmp_path / "nothing"))
    with pytest.raises(CorpusError, match=r"test\.jsonl must be readable"):
        load_splits(str(write(tmp_path, ("train", "valid"))))


def test_lm_eval_and_training_see_one_prompt() -> None:
    task = task_file()
    assert task["doc_to_text"].replace("{{context}}", "{context}") == DOCSTRING_PROMPT
    assert task["target_delimiter"] == " "


def test_the_task_is_named_and_scored_on_its_test_split() -> None:
    task = task_file()
    assert (task["task"], task["test_split"]) == (EMBEDDED_TASK, "test")
    assert [metric["metric"] for metric in task["metric_list"]] == ["acc", "acc_norm"]
