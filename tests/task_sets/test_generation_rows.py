"""Rows of generation tasks: prompts, cuts to the context, and what exceeds it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.evaluation.conftest import byte_tokenizer
from umim_core.errors import ConfigError, CorpusError, EvaluationError
from umim_core.task_sets.generation_rows import CHAT_ROOM, exceeds, make_rows
from umim_core.task_sets.generation_spec import (
    GENERATION_TASKS,
    Generated,
    GenerationQuestion,
    GenerationSet,
    Wish,
)
from umim_core.task_sets.spec import TASKS
from umim_core.task_sets.task_files import DataFile
from umim_core.task_sets.task_options import TaskOptions
from umim_core.task_sets.text_tokens import TextTokens

TOKENS = TextTokens(byte_tokenizer())
FILE = DataFile("rows.jsonl", ("text", "query", "test"), "answer", "rows of a test")
TASK = GenerationSet(
    name="umim_own",
    prompt="{text}\nQ: {query} {{}}",
    answer_prefix="About {query}:",
    source=FILE,
    metrics=("recall",),
    max_new_tokens=10,
    licence="none",
)
CUT = replace(TASK, cut="text")
TEXT = " ".join(f"{number:03}" for number in range(200))


@pytest.fixture
def options(tmp_path: Path) -> TaskOptions:
    row = {"id": "a", "text": TEXT, "query": "why", "test": "assert", "answer": "so"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    return TaskOptions(task_data=str(tmp_path))


def test_a_row_holds_the_prompt_and_what_metrics_need(options: TaskOptions) -> None:
    (row,) = make_rows(TASK, options, TOKENS, context=64)
    prompt = f"{TEXT}\nQ: why {{}}"
    assert row == {
        "id": "a",
        "prompt": prompt,
        "question": "",
        "answer_prefix": "About why:",
        "references": ["so"],
        "prompt_tokens": TOKENS.count(f"{prompt} About why:"),
        "cut_tokens": 0,
        "test": "assert",
    }


@pytest.mark.parametrize(("context", "length"), [(400, None), (400, 300), (None, 300)])
def test_a_long_field_is_cut_at_its_middle_until_prompt_and_answer_fit(
    options: TaskOptions, context: int | None, length: int | None
) -> None:
    (row,) = make_rows(CUT, replace(options, task_length=length), TOKENS, context)
    limit = length or context or 0
    assert limit - 10 - CHAT_ROOM - 6 <= row["prompt_tokens"] <= limit - 10 - CHAT_ROOM
    assert row["prompt_tokens"] == TOKENS.count(row["prompt"] + " About why:")
    assert row["cut_tokens"] > 0
    assert row["prompt"].startswith("000 001")
    assert row["prompt"].endswith("198 199\nQ: why {}")


def test_what_fits_and_what_has_no_limit_stays_whole(options: TaskOptions) -> None:
    for context in (None, 1 << 20):
        (row,) = make_rows(CUT, options, TOKENS, context)
        assert TEXT in row["prompt"]


def test_a_prompt_that_cannot_fit_is_refused(options: TaskOptions) -> None:
    with pytest.raises(EvaluationError, match="must fit without its text"):
        make_rows(CUT, options, TOKENS, context=CHAT_ROOM + 15)


def test_a_task_exceeds_a_context_by_its_length_or_by_its_longest_prompt() -> None:
    sized = replace(TASK, length=4096)
    assert exceeds(sized, TaskOptions(), 2048)
    assert not exceeds(sized, TaskOptions(), 4096)
    assert not exceeds(sized, TaskOptions(), None)
    rows = [{"prompt_tokens": 90}, {"prompt_tokens": 30}]
    assert not exceeds(TASK, TaskOptions(), 100, rows)
    assert exceeds(TASK, TaskOptions(), 99, rows)
    assert exceeds(TASK, TaskOptions(task_new_tokens=11), 100, rows)


def test_a_generator_is_told_the_room_and_can_measure_prompts() -> None:
    wishes: list[Wish] = []

    def make(wish: Wish) -> list[GenerationQuestion]:
        wishes.append(wish)
        fields = {"text": "the cat", "query": "why"}
        return [GenerationQuestion("1", fields, ("so",))] * wish.questions

    task = replace(TASK, source=Generated(make, 1), length=300)
    rows = make_rows(task, TaskOptions(task_seed=4, task_questions=2), TOKENS, 512, "train")
    (wish,) = wishes
    assert (wish.room, wish.seed, wish.split) == (300 - 10 - CHAT_ROOM, 4, "train")
    assert wish.size({"text": "the cat", "query": "why"}) == rows[1]["prompt_tokens"]
    unsized = replace(task, length=None, cut="text")
    with pytest.raises(EvaluationError, match="length of umim_own must be known"):
        make_rows(unsized, TaskOptions(), TOKENS, None)


def test_missing_data_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"must hold rows\.jsonl"):
        make_rows(TASK, TaskOptions(task_data=str(tmp_path)), TOKENS, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "own"}, "must begin with umim_"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"repeats": 0}, "at least 1"),
        ({"metrics": ()}, "metrics and a licence"),
        ({"licence": ""}, "metrics and a licence"),
        ({"prompt": "{other}"}, "among text, query, test; got .*other"),
        ({"prompt": "{text!r}"}, "plain fields"),
        ({"prompt": "{text.x}"}, "plain fields"),
        ({"prompt": "{text"}, "plain fields"),
        ({"cut": "test"}, "one of the prompt's, query, text; got test"),
    ],
)
def test_a_malformed_specification_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(TASK, **changes)


def test_an_unknown_task_is_answered_with_all_names() -> None:
    with pytest.raises(ConfigError, match=r"one of .*umim_qmsum.*Did you mean 'umim_qmsum'"):
        GENERATION_TASKS.find("umim_qmsun")
    assert not set(GENERATION_TASKS.names()) & set(TASKS.names())
