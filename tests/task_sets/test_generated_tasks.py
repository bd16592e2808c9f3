"""Generated tasks: rows, room and options; answers are in the prompts, draws can be repeated."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from random import Random

import pytest

from tests.evaluation.conftest import byte_tokenizer
from umim_core.config.model_base import Split
from umim_core.errors import ConfigError, EvaluationError
from umim_core.evaluation.text_metrics import recall, substring_match
from umim_core.task_sets.generation_spec import (
    CHAT_ROOM,
    GENERATION_TASKS,
    GenerationRow,
    GenerationSet,
    TaskOptions,
    Wish,
    make_rows,
)
from umim_core.task_sets.prompt_filling import inserted, sentences
from umim_core.text.token_ids import encode

TOKENIZER = byte_tokenizer()
NEEDLE = re.compile(r"One of the special magic \w+ for ([a-z]+-[a-z]+) is: (\d{7}|[a-z]+-[a-z]+)\.")
WISHES: list[Wish] = []


def count(text: str) -> int:
    return len(encode(TOKENIZER, text))


def make(wish: Wish, number: int) -> tuple[Mapping[str, str], Sequence[str]]:
    WISHES.append(wish)
    return {"text": "the cat", "query": "why", "test": "assert"}, ("so",)


TASK = GenerationSet(
    name="umim_own",
    prompt="{text}\nQ: {query} {{}}",
    answer_prefix="About {query}:",
    make=make,
    version=1,
    metrics=("recall",),
    max_new_tokens=10,
    length=300,
)


def test_rows_hold_what_metrics_need_and_makers_are_told_the_room() -> None:
    (row,) = make_rows(TASK, TaskOptions(task_questions=1), TOKENIZER)
    prompt = "the cat\nQ: why {}"
    assert row == {
        "id": "0",
        "prompt": prompt,
        "question": "",
        "answer_prefix": "About why:",
        "references": ["so"],
        "prompt_tokens": count(f"{prompt} About why:"),
        "test": "assert",
    }
    rows = make_rows(TASK, TaskOptions(task_seed=4, task_questions=2), TOKENIZER, "train")
    wish = WISHES[-1]
    assert (wish.room, wish.seed, wish.split) == (300 - 10 - CHAT_ROOM, 4, "train")
    assert wish.size({"text": "the cat", "query": "why"}) == rows[1]["prompt_tokens"]
    assert len(make_rows(TASK, TaskOptions(task_new_tokens=20), TOKENIZER)) == 100
    assert WISHES[-1].room == 300 - 20 - CHAT_ROOM


@pytest.mark.parametrize("room", [40, 200, 1000])
def test_a_prompt_is_filled_until_no_further_unit_fits(room: int) -> None:
    wish = Wish("own", room, lambda fields: count(f"Q: {fields['text']}?"), count, 0, "test")
    fields = wish.filled(sentences(Random(1)), lambda taken: {"text": " ".join(taken)})
    longest = max(count(text) for text in islice(sentences(Random(1)), 40))
    assert room - 2 * longest <= wish.size(fields) <= room
    with pytest.raises(EvaluationError, match="must fit into its length; got room for 3 tokens"):
        replace(wish, room=3).filled(iter(()), lambda _: {"text": "the cat sat on the mat"})


def test_what_is_inserted_stands_at_its_depth() -> None:
    assert inserted("abcd", "123", [1.0, 0.0, 0.5]) == ["2", "a", "b", "3", "c", "d", "1"]
    assert inserted("", "12", [0.9, 0.1]) == ["1", "2"]
    assert inserted("ab", "12", [0.5, 0.5]) == ["a", "1", "2", "b"]


def test_options_are_taken_from_among_the_arguments_of_the_model() -> None:
    metadata = {"checkpoint": "x", "version": 1.0, "task_seed": 3, "task_new_tokens": 64}
    metadata |= {"task_data": "data", "task_features": "of another task"}
    assert TaskOptions.read(metadata) == TaskOptions(
        task_seed=3, task_new_tokens=64, task_data="data", task_features="of another task"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task_sed": 1}, "task_sed must be a known field.* Did you mean 'task_seed'"),
        ({"task_questions": 0}, "task_questions must be at least 1; got 0"),
        ({"task_new_tokens": True}, "task_new_tokens must be an integer; got True"),
        ({"task_seed": None}, "task_seed must be an integer; got None"),
    ],
)
def test_malformed_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TaskOptions.read(options)


def rows(
    name: str, count: int = 3, split: Split = "test", **options: object
) -> list[GenerationRow]:
    given = {f"task_{option}": value for option, value in {**options, "questions": count}.items()}
    return make_rows(GENERATION_TASKS.find(name), TaskOptions.read(given), TOKENIZER, split)


@pytest.mark.parametrize("name", GENERATION_TASKS.names())
def test_prompts_have_the_length_of_their_task(name: str) -> None:
    task = GENERATION_TASKS.find(name)
    room = task.length - task.max_new_tokens - CHAT_ROOM
    (row,) = rows(name, 1)
    whole = f"{row['prompt']} {row['answer_prefix']}" if row["answer_prefix"] else row["prompt"]
    assert row["prompt_tokens"] == count(whole)
    unit = 420 if "multidoc" in name else 130  # the longest document or sentence, nearly by letters
    assert room - unit <= row["prompt_tokens"] <= room
    assert name.startswith("umim_") and task.metrics  # no stock task has the name
    assert all(field.isidentifier() for field in task.used_fields())


@pytest.mark.parametrize(
    "name", ["umim_ruler_1k", "umim_ruler_words_1k", "umim_multidoc_2k", "umim_govreport_generated"]
)
def test_questions_follow_from_seed_and_split(name: str) -> None:
    found = rows(name)
    assert found == rows(name)
    assert found[:2] == rows(name, 2)
    others = rows(name, split="train") + rows(name, seed=1)
    assert len({row["prompt"] for row in found + others}) == 9


@pytest.mark.parametrize("name", ["umim_ruler_2k", "umim_ruler_words_4k"])
def test_four_needles_of_one_key_lie_in_the_text_at_their_depths(name: str) -> None:
    for row in rows(name, 5):
        found = list(NEEDLE.finditer(row["prompt"]))
        assert {match[1] for match in found} == {row["answer_prefix"].split()[5]}
        assert {match[2] for match in found} == set(row["references"])
        assert len(set(row["references"])) == 4
        text = row["prompt"].split("\n")[1]
        depths = sorted(float(depth) for depth in row["depths"].split())
        assert [match.start() / len(text) for match in found] == pytest.approx(depths, abs=0.2)
        assert recall([" ".join(row["references"][:3])], row) == {"recall": 0.75}
        assert recall([row["prompt"]], row) == {"recall": 1.0}


def test_one_document_answers_and_its_place_goes_through_the_prompt() -> None:
    places = []
    for row in rows("umim_multidoc_4k", 8):
        given = row["prompt"].rpartition("\n\nQuestion")[0]
        documents = re.split(r"\n\n(?=Document \[)", given)[1:]
        (answer,) = row["references"]
        holding = [n for n, text in enumerate(documents, 1) if answer in text]
        assert row["position"] == f"{holding[0]} of {len(documents)}"
        assert len(holding) == 1
        subject = re.search(r"the ([A-Z]\w+ [A-Z]\w+)", row["prompt"].rpartition("Question:")[2])
        assert subject is not None
        assert f"Document [{holding[0]}](Title: {subject[1]}" in documents[holding[0] - 1]
        assert substring_match([f" It is {answer}."], row) == {"substring_match": 1.0}
        places.append((holding[0] - 0.5) / len(documents))
    assert min(places) < 0.2
    assert max(places) > 0.8
