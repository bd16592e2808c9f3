"""Tasks as data: what lm-eval and training see of them, and where questions come from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")

from lm_eval.tasks import TaskManager

from umim_core.adaptation.choices import encode_pair, task_sequences
from umim_core.config.recipe import DEFAULT_TASK
from umim_core.errors import ConfigError, CorpusError
from umim_core.evaluation import tasks
from umim_core.evaluation.tasks.lm_eval_tasks import lm_eval_config, load_splits
from umim_core.task_sets.spec import TASKS, Question, QuestionForm, TaskSet, read_questions

DOCSTRINGS = TASKS.find(DEFAULT_TASK)


def write(folder: Path, splits: tuple[str, ...] = ("train", "valid", "test")) -> Path:
    for split in splits:
        row = {"id": "1", "context": f"body {split}", "choices": ["a", "b"], "gold": 1}
        (folder / f"{split}.jsonl").write_text(json.dumps(row) + "\n", "utf-8")
    return folder


def test_a_missing_folder_or_split_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="task_data must name a folder"):
        load_splits(DOCSTRINGS, str(tmp_path / "nothing"))
    with pytest.raises(CorpusError, match=r"test\.jsonl: the file must be readable"):
        load_splits(DOCSTRINGS, str(write(tmp_path, ("train", "valid"))))


def test_lm_evals_own_command_finds_the_task_of_the_specification(tmp_path: Path) -> None:
    (folder,) = tasks.__path__
    options = {"task_data": str(write(tmp_path))}
    manager = TaskManager(include_path=folder, include_defaults=False, metadata=options)
    loaded = [manager.load([spec])["tasks"] for spec in (DEFAULT_TASK, lm_eval_config(DOCSTRINGS))]
    for found in loaded:
        task = found[DEFAULT_TASK]
        task.set_config("num_fewshot", 0)
        task.build_all_requests()
        asked = [request.args for request in task.instances]
        assert asked == [("body test\n\nSummary:", " a"), ("body test\n\nSummary:", " b")]
        assert task.doc_to_target(task.test_docs()[0]) == 1
        assert set(task.aggregation()) == {"acc", "acc_norm"}
        assert task.VERSION == 1.0


@pytest.mark.parametrize("delimiter", [" ", "\n"])
def test_lm_eval_and_training_see_one_text(tmp_path: Path, delimiter: str) -> None:
    def encode(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    form = QuestionForm("Q: {context}\nA:", delimiter)
    made = replace(DOCSTRINGS, form=form)
    data = write(tmp_path)
    manager = TaskManager(include_defaults=False, metadata={"task_data": str(data)})
    task = manager.load([lm_eval_config(made)])["tasks"][DEFAULT_TASK]
    task.set_config("num_fewshot", 0)
    task.build_all_requests()
    gold = task.instances[1].args
    [(ids, _)] = task_sequences(read_questions(data / "test.jsonl"), encode, form)
    context, ending = encode_pair(encode, *gold)
    assert ids.tolist() == [*context, *ending]


def test_questions_of_a_task_are_written_once_per_content_of_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    written: list[Path] = []

    def put(out: Path, *_: object) -> None:
        written.append(write(out))

    version = [["words", "1"]]
    own = TaskSet(name="own", write=put, chance=0.5, form=QuestionForm(), sources=lambda: version)
    assert own.built() == own.built()
    version[0][1] = "2"
    assert load_splits(own)["test"][0]["gold"] == 1
    assert len(written) == 2


@pytest.mark.parametrize(
    "prompt", ["Summary:", "{{context}}", "{context} {name}", "{context!r}", "{context", "{}"]
)
def test_a_prompt_has_one_field(prompt: str) -> None:
    with pytest.raises(ConfigError, match=r"the field \{context\} once"):
        QuestionForm(prompt)


@pytest.mark.parametrize("name", TASKS.names())
def test_a_task_is_scored_and_its_questions_have_an_origin(name: str) -> None:
    task = TASKS.find(name)
    assert "test" in task.splits
    assert task.corpus is not None or task.sources()  # else changes are not noticed


def test_a_task_is_in_keys() -> None:
    other = replace(DOCSTRINGS, name="other")
    assert other.key()["task"] == "other"
    assert other.key() != replace(other, form=QuestionForm()).key()


def test_questions_are_read_in_order_and_extra_keys_ignored(tmp_path: Path) -> None:
    row = {"id": "q1", "context": "a\u2028b", "choices": ["x", "y"], "gold": 1}
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n\n", "utf-8")
    assert read_questions(path) == [Question("a\u2028b", ("x", "y"), 1, "q1")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{]", "q.jsonl:1: a line must be JSON"),
        ('{"context": "c", "choices": ["a", "b"]}', "q.jsonl:1 must hold context"),
        ('{"context": "c", "choices": ["a", "b"], "gold": true}', "q.jsonl:1 must hold context"),
        ('{"context": "c", "choices": ["a"], "gold": 0}', "q.jsonl:1: .* at least two choices"),
        ('{"context": "c", "choices": ["a", "b"], "gold": 0}\n\n[1]', "q.jsonl:3: a row must be a"),
        ("", "must hold questions"),
        (None, "q.jsonl: the file must be readable"),
    ],
)
def test_bad_lines_name_file_and_line(tmp_path: Path, line: str | None, message: str) -> None:
    path = tmp_path / "q.jsonl"
    if line is not None:
        path.write_bytes(f"{line}\n".encode(errors="surrogateescape"))
    with pytest.raises(CorpusError, match=message):
        read_questions(path)
