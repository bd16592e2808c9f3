"""Questions of lm-eval's tasks for training: the splits, texts and answers that lm-eval has."""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

import lm_eval.tasks
import numpy as np
import pytest
from lm_eval.tasks import TaskManager

from support.harness_files import write_data_set
from tasks.run.recipes import find_recipe
from tasks.stages.table import TableQuestions
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.config.table_recipe import TableRecipe
from umim_core.errors import ConfigError, CorpusError, MissingExtraError
from umim_core.evaluation.questions import QuestionSource, question_set
from umim_core.evaluation.tasks import lm_eval_tasks
from umim_core.evaluation.tasks.lm_eval_tasks import (
    harness_questions,
    knows_task,
    load_ruler,
    load_tasks,
    standing_for_the_hub,
)
from umim_core.store.artifacts import directory_digest

Row = Mapping[str, object]


def arc(place: int) -> Row:
    labels = ["1", "2", "3"] if place % 2 else ["A", "B", "C"]
    return {
        "id": f"q{place}",
        "question": f"What is {place}?",
        "choices": {"text": [f"iron {place}", "wood", "tin"], "label": labels},
        "answerKey": labels[place % 3],
    }


def hellaswag(place: int) -> Row:
    return {
        "ind": place,
        "activity_label": "Roof",
        "ctx_a": f"Man {place} is on a roof [header] up.",
        "ctx_b": "he",
        "ctx": f"Man {place} is on a roof [header] up. he",
        "endings": ["[step] slides  down.", "sings [title] again.", "eats.", "sleeps."],
        "label": str(place % 4),
    }


def ethics(place: int) -> Row:
    return {"input": f"I fed {place} cats.", "label": place % 2}


def math(place: int) -> Row:
    return {"question": f"What is {place} + 1?", "answer": f"#### {place + 1}"}


# Folders of lm-eval with the tasks that are asked for here, the tag and the group.
FEW = ("arc", "hellaswag", "hendrycks_ethics", "gsm8k", "mmlu/default", "ruler")


@pytest.fixture(scope="module", autouse=True)
def _index() -> Iterator[None]:
    """Index some folders of lm-eval; that of all takes 20 s to build."""
    folders = [Path(lm_eval.tasks.__file__).parent / name for name in FEW]
    assert all(folder.is_dir() for folder in folders)
    index = TaskManager(include_path=folders, include_defaults=False, metadata={})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_eval_tasks, "_shipped", lambda: index)
        yield


@pytest.fixture
def hub(local_hub: Path) -> Path:
    """Copies of four data sets: all splits, no test split, no validation split, no choices."""
    made, places = local_hub / "hub", list(range(10))
    arcs, endings = [arc(place) for place in places], [hellaswag(place) for place in places]
    for name, config, splits in (
        ("allenai/ai2_arc", "ARC-Easy",
         {"train": arcs[:5], "validation": arcs[5:7], "test": arcs[7:]}),
        ("Rowan/hellaswag", "default", {"train": endings[:4], "validation": endings[4:7]}),
        ("EleutherAI/hendrycks_ethics", "commonsense",
         {"train": [ethics(place) for place in places[:3]], "test": [ethics(8), ethics(9)]}),
        ("openai/gsm8k", "main", {"train": [math(1)], "test": [math(2)]}),
    ):  # fmt: skip
        write_data_set(made, name, config, splits)
    return made


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("arc_easy", {"train": 5, "valid": 2, "test": 3}),
        ("hellaswag", {"train": 4, "test": 3}),  # lm-eval scores its validation split
        ("ethics_cm", {"train": 3, "test": 2}),
    ],
)
def test_questions_are_those_that_lm_eval_asks(
    hub: Path, name: str, sizes: Mapping[str, int]
) -> None:
    form, found = harness_questions(name, hub)
    assert {split: len(part) for split, part in found.items()} == sizes
    with standing_for_the_hub(str(hub), directory_digest(hub)):
        task = load_tasks([name])[name]
    docs = {"train": task.training_docs(), "valid": task.validation_docs(), "test": task.eval_docs}
    for split, part in found.items():
        for question, doc in zip(part, docs[split], strict=True):
            requests = task.construct_requests(doc, task.fewshot_context(doc, num_fewshot=0))
            asked = [form.prompt.replace("{context}", question.context)] * len(question.choices)
            given = [form.delimiter + choice for choice in question.choices]
            assert [request.args for request in requests] == list(zip(asked, given, strict=True))
            target = task.doc_to_target(doc)
            assert question.gold == (target if isinstance(target, int) else int(str(target)))
            assert question.id == str(doc.get("id", ""))
    assert form.part == "context"


@pytest.mark.parametrize("name", ["ai2_arc", "mmlu", "arc_easier"])
def test_tags_groups_and_unknown_names_are_refused(hub: Path, name: str) -> None:
    assert not knows_task(name)
    with pytest.raises(ConfigError, match=f"one task that it ships; got {name}. .*ls subtasks"):
        harness_questions(name, hub)


SPLITS = {split: [arc(0)] for split in ("train", "validation", "test")}
WRONG = {"train": [ethics(0), {**ethics(1), "label": 2}], "test": [ethics(2)]}
NONE = {"train": [ethics(0), {**ethics(1), "label": None}], "test": [ethics(2)]}


@pytest.mark.parametrize(
    ("name", "splits", "message"),
    [
        ("arc_easy", {}, "data of lm-eval's task arc_easy must be at hand"),
        *(
            ("arc_easy", {n: rows for n, rows in SPLITS.items() if n != split},
             f"with all its splits; got .*KeyError: '{split}'")
            for split in SPLITS
        ),
        ("ethics_cm", WRONG, "gold must be an index into 2 choices"),
        ("ethics_cm", NONE, "question 1 of lm-eval's ethics_cm must have a text and one answer"),
    ],
)  # fmt: skip
def test_data_that_are_not_whole_are_refused(
    hub: Path, name: str, splits: Mapping[str, list[Row]], message: str
) -> None:
    place, config = {
        "arc_easy": ("allenai/ai2_arc", "ARC-Easy"),
        "ethics_cm": ("EleutherAI/hendrycks_ethics", "commonsense"),
    }[name]
    shutil.rmtree(hub / place)
    if splits:
        write_data_set(hub, place, config, splits)
    with pytest.raises(CorpusError, match=message):
        harness_questions(name, hub)


@contextmanager
def drawing_thread() -> Iterator[None]:
    """Another thread of the process draws from its generators."""
    ended = Event()

    def draw() -> None:
        while not ended.wait(0.001):
            random.random(), np.random.rand()

    thread = Thread(target=draw)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_ruler_draws_the_same_questions_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ("noun", "verb", "adjective", "nouns", "verbs", "adjectives")
    words = SimpleNamespace(_categories={kind: [f"{kind}{n}" for n in range(20)] for kind in kinds})
    monkeypatch.setitem(sys.modules, "wonderwords", SimpleNamespace(RandomWord=lambda: words))
    monkeypatch.setattr("nltk.data.find", lambda _: None)  # nothing is downloaded
    assert lm_eval_tasks._RULER_TOKENS == 4096  # it takes four times as long
    monkeypatch.setattr(lm_eval_tasks, "_RULER_TOKENS", 1024)
    tokenizer = load_tokenizer("umim-docs-llama")
    with drawing_thread():
        tasks = [load_ruler("ruler_cwe", tokenizer, seed) for seed in (0, 0, 1)]
    first, again, other = (list(task.eval_docs) for task in tasks)
    assert first == again != other
    answer = ", ".join(first[0]["outputs"][:5])
    lm_evals = tasks[0].config.process_results.__globals__  # it gives -1 for its other lengths
    assert lm_evals["DEFAULT_SEQ_LENGTHS"] == [4096]
    monkeypatch.setitem(lm_evals, "DEFAULT_SEQ_LENGTHS", [1024])
    assert tasks[0].process_results(first[0], [answer]) == {"1024": 0.5}
    asked = question_set(QuestionSource("ruler_cwe", backbone="umim-docs-llama"))
    assert (asked.count, asked.metrics) == (500, ("1024",))
    recipe = find_recipe("tables/long-context-ruler-qwen")
    assert isinstance(recipe, TableRecipe)
    assert "tokenizer" in TableQuestions(recipe, "ruler_cwe").digests
    with pytest.raises(ConfigError, match="one that it ships; got niah_single_9"):
        load_ruler("niah_single_9", tokenizer, 0)
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'lm_eval\[ruler\]'"):
        load_ruler("niah_single_1", tokenizer, 0)
