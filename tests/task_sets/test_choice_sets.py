"""Multiple-choice data sets of the paper: rows of the hub, files of a folder, prompts."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")

from lm_eval.tasks._yaml_loader import load_yaml

from umim_core.errors import CorpusError
from umim_core.evaluation.tasks.spec_task import lm_eval_config, load_splits
from umim_core.task_sets.choice_questions import Question
from umim_core.task_sets.choice_sets import CHOICE_SETS
from umim_core.task_sets.spec import TASKS

BY_NAME = {each.name: each for each in CHOICE_SETS}
LETTERED = {
    "id": "q7",
    "choices": {"text": ["iron", "wood", "tin"], "label": ["A", "B", "C"]},
    "answerKey": "C ",
}
PIQA = {"goal": "open a jar", "sol1": "twist the lid", "sol2": "eat the lid", "label": 0}
COPA = {
    "premise": "The sun rose. ",
    "choice1": "It was light.",
    "choice2": "It was dark.",
    "question": "effect",
    "label": 0,
}
HELLASWAG = {
    "activity_label": "Roof",
    "ctx_a": "A man is on a roof [header] up.",
    "ctx_b": "he",
    "endings": ["[step] slides  down.", "sings [title] again.", "eats.", "sleeps."],
    "label": "1",
}


@pytest.mark.parametrize(
    ("name", "row", "question"),
    [
        ("piqa", PIQA, Question("open a jar", ("twist the lid", "eat the lid"), 0)),
        (
            "copa",
            COPA,
            Question("The sun rose therefore", ("it was light.", "it was dark."), 0),
        ),
        (
            "openbookqa",
            LETTERED | {"question_stem": "a can is"},
            Question("a can is", ("iron", "wood", "tin"), 2, "q7"),
        ),
        (
            "arc_easy",
            LETTERED | {"question": "What is a can?"},
            Question("What is a can?", ("iron", "wood", "tin"), 2, "q7"),
        ),
        (
            "hellaswag",
            HELLASWAG,
            Question(
                "Roof: A man is on a roof up. He",
                (" slides down.", "sings. again.", "eats.", "sleeps."),
                1,
            ),
        ),
    ],
)
def test_a_row_of_the_hub_becomes_a_question(
    name: str, row: dict[str, Any], question: Question
) -> None:
    assert BY_NAME[name].read(row) == question


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("piqa", "piqa/piqa"),
        ("arc_easy", "arc/arc_easy"),
        ("openbookqa", "openbookqa/openbookqa"),
        ("hellaswag", "hellaswag/hellaswag"),
        ("copa", "super_glue/copa/default"),
    ],
)
def test_hub_and_prompt_are_those_of_the_stock_task(name: str, file: str) -> None:
    found = find_spec("lm_eval")
    assert found is not None and found.origin is not None
    stock = load_yaml(Path(found.origin).parent / "tasks" / f"{file}.yaml", resolve_func=False)
    own = lm_eval_config(TASKS.find(f"umim_{name}"))
    if str(stock["doc_to_text"]).startswith("Question:"):
        fields = stock["doc_to_text"].replace("{{goal}}", "X").replace("{{question}}", "X")
        assert own["doc_to_text"].replace("{{context}}", "X") == fields
    else:  # a function, or the field alone
        assert own["doc_to_text"] == "{{context}}"
    split = stock.get("test_split") or stock["validation_split"]
    assert BY_NAME[name].hub == (stock["dataset_path"], stock.get("dataset_name"), split)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def copa_file(folder: Path, name: str = "copa_dev", rows: int = 1) -> Path:
    text = {"context": "The sun rose therefore", "choices": ["it was light.", "it was dark."]}
    write(folder / "mc" / f"{name}.jsonl", [{"id": f"{i}", "gold": 0} | text for i in range(rows)])
    return folder


def test_folder_and_hub_give_the_same_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = TASKS.find("umim_piqa")
    row = {"context": PIQA["goal"], "choices": [PIQA["sol1"], PIQA["sol2"]], "gold": 0}
    write(tmp_path / "mc/piqa_valid.jsonl", [row])
    write(tmp_path / "hub/baber/piqa/validation.jsonl", [PIQA])
    monkeypatch.chdir(tmp_path / "hub")  # a local folder of the hub's name stands for it
    found = []
    for folder in ("", str(tmp_path / "mc")):
        monkeypatch.setenv("UMIM_TASK_DATA", folder)
        task.write(tmp_path, None, None)
        found.append((task.sources(), (tmp_path / "test.jsonl").read_bytes()))
    assert found[0] == found[1]
    assert json.loads(found[0][1]) == row | {"id": "0"}


def test_a_change_of_a_question_changes_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMIM_TASK_DATA", str(tmp_path))
    digests = []
    for rows in (1, 2):
        copa_file(tmp_path, rows=rows)
        digests.append(TASKS.find("umim_copa").sources())
    assert digests[0] != digests[1]


def test_written_questions_are_limited_and_keep_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMIM_TASK_DATA", str(copa_file(tmp_path, rows=3)))
    TASKS.find("umim_copa").write(tmp_path, {"test": 2}, None)
    lines = (tmp_path / "test.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["0", "1"]


def test_lm_eval_reads_the_file_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMIM_TASK_DATA", str(tmp_path / "nothing"))
    splits = load_splits(TASKS.find("umim_copa"), str(copa_file(tmp_path, rows=2)))
    assert {name: len(rows) for name, rows in splits.items()} == {"test": 2}


@pytest.mark.parametrize("files", [(), ("copa", "copa_dev")])
def test_a_folder_must_hold_one_file_of_the_set(tmp_path: Path, files: tuple[str, ...]) -> None:
    copa_file(tmp_path, name="other")
    for file in files:
        copa_file(tmp_path, name=file)
    with pytest.raises(CorpusError, match=r"must hold one file copa.jsonl or copa_\*.jsonl; got"):
        load_splits(TASKS.find("umim_copa"), str(tmp_path))


def test_without_folder_and_hub_the_error_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UMIM_TASK_DATA", raising=False)
    write(tmp_path / "baber/piqa/train.jsonl", [PIQA])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        CorpusError, match=r"'baber/piqa' must be loadable.*set UMIM_TASK_DATA to a"
    ):
        TASKS.find("umim_piqa").sources()
    write(tmp_path / "Rowan/hellaswag/validation.jsonl", [{"ctx": "other fields"}])
    with pytest.raises(CorpusError, match=r"'Rowan/hellaswag' must have the fields.*KeyError"):
        TASKS.find("umim_hellaswag").sources()
