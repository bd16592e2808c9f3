"""Questions, and the token sequences built from them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from umim_core.adaptation.choices import (
    encode_pair,
    encode_questions,
    mining_segments,
    task_sequences,
)
from umim_core.errors import ConfigError, CorpusError
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet
from umim_core.task_sets.spec import Question, QuestionForm


def characters(text: str) -> list[int]:
    """One token per character."""
    return [ord(character) for character in text]


def text_of(ids: Sequence[int]) -> str:
    return "".join(chr(int(i)) for i in ids)


CONTEXT = QuestionForm(part="context")
QUESTION = Question("ab", ("x", "yz"), gold=1)


def test_the_worked_example_of_the_module_docstring() -> None:
    [sequence] = task_sequences([QUESTION], characters, QuestionForm("{context}?"))
    [encoded] = encode_questions([QUESTION], characters, QuestionForm("{context}?"))
    assert text_of(sequence.ids) == "ab? yz"
    assert sequence.mergeable == 6
    assert text_of(encoded.context) == "ab?"
    assert [text_of(ending) for ending in encoded.endings] == [" x", " yz"]
    assert encoded.gold == 1


@pytest.mark.parametrize("gold", [0, 1])
@pytest.mark.parametrize("length", [4, 5, 7, 20])
def test_a_sequence_is_the_question_as_it_is_scored(length: int, gold: int) -> None:
    questions = [Question("abcdef", ("x", "yz"), gold)]
    [sequence] = task_sequences(questions, characters, CONTEXT, max_length=length)
    [encoded] = encode_questions(questions, characters, CONTEXT, max_length=length)
    assert sequence.ids.tolist() == [*encoded.context, *encoded.endings[gold]]
    assert sequence.mergeable == len(encoded.context)


def test_merging_the_context_only_leaves_the_answer_raw() -> None:
    question = Question("abab", ("cab", "d"), gold=0)
    matcher = Matcher(RuleSet.from_spans([tuple(characters("ab"))]))
    lengths = {
        merge: task_sequences([question], characters, QuestionForm(part=merge))[0]
        .segment(matcher)[1]
        .tolist()
        for merge in ("context", "sequence")
    }
    assert lengths == {"context": [2, 2, 1, 1, 1, 1], "sequence": [2, 2, 1, 1, 2]}


@pytest.mark.parametrize(("part", "expected"), [("sequence", "ab yzc q"), ("context", "abc")])
def test_mining_segments_are_ragged_and_unpadded(part: str, expected: str) -> None:
    questions = [QUESTION, Question("c", ("q", "r"), 0)]
    flat, offsets = mining_segments(task_sequences(questions, characters, QuestionForm(part=part)))
    assert text_of(flat) == expected
    assert offsets.tolist() == ([0, 5, 8] if part == "sequence" else [0, 2, 3])


def test_long_prompts_lose_leading_tokens_and_answers_stay_whole() -> None:
    [encoded] = encode_questions(
        [Question("abcdef", ("x", "yz"), 0)], characters, CONTEXT, max_length=5
    )
    assert text_of(encoded.context) == "ef"
    assert [len(ending) for ending in encoded.endings] == [2, 3]


def test_an_answer_that_leaves_no_room_is_refused() -> None:
    for build in (encode_questions, task_sequences):
        with pytest.raises(CorpusError, match="1 to 2 tokens"):
            build([QUESTION], characters, CONTEXT, max_length=3)


def test_blanks_at_the_end_of_a_prompt_move_to_the_answer() -> None:
    context, ending = encode_pair(characters, "ab  ", "c")
    assert (text_of(context), text_of(ending)) == ("ab", "  c")


def test_a_prompt_without_its_field_or_a_tiny_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\{context\}"):
        QuestionForm("Summary:")
    with pytest.raises(ConfigError, match="max_length"):
        encode_questions([QUESTION], characters, CONTEXT, max_length=1)
