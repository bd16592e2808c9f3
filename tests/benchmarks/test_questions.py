"""Questions made by rule: their number, two halves without anything in common, right keys."""

from __future__ import annotations

import re

import pytest

from benchmarks.answers.questions import HALVES, LISTS, Question, questions


def test_the_halves_share_no_sentence() -> None:
    said = {
        half: {
            sentence
            for which in LISTS
            for question in questions(which, half)
            for sentence in re.split(r"(?<=[.?!])\s+", question.text)
        }
        for half in HALVES
    }
    assert not said["choose"] & said["report"]


@pytest.mark.parametrize("half", HALVES)
def test_a_half_has_400_questions_and_documents_hold_their_answers(half: str) -> None:
    asked = {which: questions(which, half) for which in LISTS}  # type: ignore[arg-type]
    assert {which: len(found) for which, found in asked.items()} == {"chats": 280, "documents": 120}
    assert asked["chats"] == questions("chats", half)  # type: ignore[arg-type]
    for question in asked["documents"]:
        assert question.accepts(question.text.rpartition("\n\n")[0])


def test_a_key_is_a_whole_word() -> None:
    question = Question("q", "?", ("cat", "7"))
    assert [question.accepts(a) for a in ("A Cat.", "7!", "concatenate", "17")] == [
        True,
        True,
        False,
        False,
    ]
