"""Generated tasks: answers are in the prompts, lengths are right, draws can be repeated."""

from __future__ import annotations

import re

import pytest

from support.counted_texts import TOKENIZER, count
from umim_core.evaluation.text_metrics import recall, substring_match
from umim_core.task_sets.generation_spec import (
    CHAT_ROOM,
    GENERATION_TASKS,
    GenerationRow,
    TaskOptions,
    make_rows,
)
from umim_core.task_sets.spec import TaskSplit

NEEDLE = re.compile(r"One of the special magic \w+ for ([a-z]+-[a-z]+) is: (\d{7}|[a-z]+-[a-z]+)\.")


def rows(
    name: str, count: int = 3, split: TaskSplit = "test", **options: object
) -> list[GenerationRow]:
    asked = TaskOptions.read(
        {"task_questions": count, **{f"task_{k}": v for k, v in options.items()}}
    )
    return make_rows(GENERATION_TASKS.find(name), asked, TOKENIZER, split)


@pytest.mark.parametrize("name", GENERATION_TASKS.names())
def test_prompts_have_the_length_of_their_task(name: str) -> None:
    task = GENERATION_TASKS.find(name)
    room = task.length - task.max_new_tokens - CHAT_ROOM
    (row,) = rows(name, 1)
    whole = f"{row['prompt']} {row['answer_prefix']}" if row["answer_prefix"] else row["prompt"]
    assert row["prompt_tokens"] == count(whole)
    unit = 420 if "multidoc" in name else 130  # the longest document or sentence, nearly by letters
    assert room - unit <= row["prompt_tokens"] <= room


@pytest.mark.parametrize(
    "name",
    ["umim_ruler_1k", "umim_ruler_words_1k", "umim_multidoc_2k", "umim_govreport_generated"],
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
        documents = re.split(r"\n\n(?=Document \[)", row["prompt"].rpartition("\n\nQuestion")[0])[
            1:
        ]
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
