"""Questions as token sequences, as splits that share nothing, and as rules of their task."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from itertools import combinations, pairwise

import numpy as np
import pytest

from support.ngram_oracle import grams_of
from umim_core.adaptation.choices import (
    encode_questions,
    mine_task_rules,
    split_questions,
    task_sequences,
)
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.config.evaluate import MergedPart
from umim_core.config.model_base import Split
from umim_core.config.rule_options import AS_FOUND, RuleOptions
from umim_core.errors import CorpusError
from umim_core.task_sets.spec import Question, QuestionForm
from umim_core.text import token_ids


def characters(text: str) -> list[int]:
    """One token per character."""
    return [ord(character) for character in text]


def text_of(ids: Sequence[int]) -> str:
    return "".join(chr(int(i)) for i in ids)


CONTEXT = QuestionForm(part="context")
QUESTION = Question("ab", ("x", "yz"), gold=1)


def test_the_worked_example_of_the_module_docstring() -> None:
    [(ids, mergeable)] = task_sequences([QUESTION], characters, QuestionForm("{context}?"))
    [encoded] = encode_questions([QUESTION], characters, QuestionForm("{context}?"))
    assert (text_of(ids), mergeable) == ("ab? yz", 6)
    assert text_of(encoded.context) == "ab?"
    assert [text_of(ending) for ending in encoded.endings] == [" x", " yz"]
    assert encoded.gold == 1


@pytest.mark.parametrize("gold", [0, 1])
@pytest.mark.parametrize("length", [4, 5, 7, 20])
def test_a_sequence_is_the_question_as_it_is_scored_and_answers_stay_whole(
    length: int, gold: int
) -> None:
    questions = [Question("abcdef", ("x", "yz"), gold)]
    [(ids, mergeable)] = task_sequences(questions, characters, CONTEXT, max_length=length)
    [encoded] = encode_questions(questions, characters, CONTEXT, max_length=length)
    assert text_of(encoded.context) == "abcdef"[-(length - 3) :]
    assert [len(ending) for ending in encoded.endings] == [2, 3]
    assert ids.tolist() == [*encoded.context, *encoded.endings[gold]]
    assert mergeable == len(encoded.context)


def test_questions_that_cannot_be_encoded_are_refused() -> None:
    for build in (encode_questions, task_sequences):
        with pytest.raises(CorpusError, match="1 to 2 tokens"):
            build([QUESTION], characters, CONTEXT, max_length=3)


SIZES: dict[Split, int] = {"train": 100, "valid": 5, "test": 8}


def numbered(count: int, prefix: str = "q") -> list[Question]:
    return [Question(f"{prefix}{n}?", ("a", "b"), n % 2, f"{prefix}{n}") for n in range(count)]


def test_splits_cut_by_id_share_nothing_and_do_not_depend_on_the_order() -> None:
    given = numbered(40)
    splits = split_questions({"train": given}, SIZES)
    assert {name: len(part) for name, part in splits.items()} == {
        "train": 27,
        "valid": 5,
        "test": 8,
    }
    for one, other in combinations(splits.values(), 2):
        assert not {q.context for q in one} & {q.context for q in other}
    shuffled = [given[place] for place in np.random.default_rng(0).permutation(40)]
    assert split_questions({"train": shuffled}, SIZES) == splits
    renamed = [Question(q.context, q.choices, q.gold, f"x{q.id}") for q in given]
    moved = split_questions({"train": renamed}, SIZES)["test"]
    assert {q.context for q in splits["test"]} != {q.context for q in moved}


def test_given_splits_stay_and_training_loses_what_a_later_split_asks() -> None:
    test = numbered(6)
    found = split_questions({"train": numbered(30), "test": test}, SIZES)
    assert {q.id for q in found["test"]} == {q.id for q in test}
    asked = {q.context for part in ("valid", "test") for q in found[part]}  # type: ignore[index]
    assert len(found["valid"]) == 5 and not asked & {q.context for q in found["train"]}
    assert len(found["train"]) == 30 - 6 - 5


def test_a_question_asked_twice_does_not_straddle_a_border() -> None:
    twice = [Question("same?", ("a", "b"), 0, f"id{n}") for n in range(30)]
    splits = split_questions({"train": [*numbered(40), *twice]}, SIZES)  # type: ignore[arg-type]
    holders = [name for name, part in splits.items() if any(q.context == "same?" for q in part)]
    assert len(holders) == 1


@pytest.mark.parametrize(
    "given", [{}, {"train": []}, {"train": numbered(8)}, {"train": numbered(13)}]
)
def test_a_split_that_would_be_empty_is_refused(given: dict[Split, list[Question]]) -> None:
    with pytest.raises(CorpusError):
        split_questions(given, SIZES)


LENGTH = 24


def options(tau: int, **changes: object) -> RuleOptions:
    asked = {"tau": tau, "segment_length": None, **AS_FOUND, **changes}
    return RuleOptions.model_validate(asked)


@pytest.mark.parametrize("part", ["sequence", "context"])
def test_every_threshold_gives_the_bigrams_of_a_counter(part: MergedPart) -> None:
    # Each text once: every threshold asks for all of them again.
    encode = cache(partial(token_ids.encode, load_tokenizer("umim-docs-gpt2")))
    draw, words = random.Random(0), ["Return", "the", "sum", "of", "an", "array's", "axes,", "12"]

    def text(least: int, most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(least, most)))

    questions = [
        Question(text(2, 40) + " " * draw.randint(0, 2), (text(1, 4), text(1, 4)), n % 2)
        for n in range(300)
    ]
    counts: Counter[tuple[int, ...]] = Counter()
    for question in questions:
        context = question.context.rstrip()
        blanks = question.context[len(context) :]
        alone = encode(context)
        answers = [encode(f"{context}{blanks} {c}")[len(alone) :] for c in question.choices]
        kept = alone[-(LENGTH - max(map(len, answers))) :]
        counts.update(pairwise(kept if part == "context" else kept + answers[question.gold]))
    sizes = set()
    for tau in (50, 5, 1):
        form, asked = QuestionForm(part=part), options(tau)
        rules = mine_task_rules(questions, encode, asked, form, max_length=LENGTH)
        assert grams_of(rules) == {g: n for g, n in counts.items() if n >= tau}
        assert rules.options == asked
        sizes.add(len(rules))
    assert len(sizes) == 3


def test_the_corpus_digest_tells_what_was_counted() -> None:
    question = Question("abc", ("x", "y"), 0)
    forms = [QuestionForm(part="sequence"), CONTEXT]
    digests = {
        mine_task_rules([question], characters, options(tau), form).origin.corpus_digest
        for form in forms
        for tau in (1, 2)
    }
    assert len(digests) == 2
