"""Rows and options of generation tasks: prompts, their room, what metrics need, bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from support.counted_texts import TOKENIZER, count
from umim_core.errors import ConfigError
from umim_core.task_sets.generation_spec import (
    CHAT_ROOM,
    GenerationQuestion,
    GenerationSet,
    TaskOptions,
    Wish,
    make_rows,
)

WISHES: list[Wish] = []


def make(wish: Wish) -> Iterator[GenerationQuestion]:
    WISHES.append(wish)
    for number in range(wish.questions):
        fields = {"text": "the cat", "query": "why", "test": "assert"}
        yield GenerationQuestion(str(number), fields, ("so",))


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


def test_a_row_holds_the_prompt_and_what_metrics_need() -> None:
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


def test_a_generator_is_told_the_room_and_can_measure_prompts() -> None:
    rows = make_rows(TASK, TaskOptions(task_seed=4, task_questions=2), TOKENIZER, "train")
    wish = WISHES[-1]
    assert (wish.room, wish.seed, wish.split) == (300 - 10 - CHAT_ROOM, 4, "train")
    assert wish.size({"text": "the cat", "query": "why"}) == rows[1]["prompt_tokens"]
    assert len(make_rows(TASK, TaskOptions(task_new_tokens=20), TOKENIZER)) == 100
    assert WISHES[-1].room == 300 - 20 - CHAT_ROOM


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "own"}, "must begin with umim_"),
        ({"length": 10}, "below the length"),
        ({"licence": ""}, "metrics and a licence"),
        ({"prompt": "{text.x}"}, "plain fields"),
    ],
)
def test_a_malformed_specification_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(TASK, **changes)


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
