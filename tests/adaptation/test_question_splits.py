"""Splits by id: they do not depend on the order, share no question, and refuse to be empty."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from umim_core.adaptation.choices import split_questions
from umim_core.errors import CorpusError
from umim_core.task_sets.spec import Question, TaskSplit

SIZES: dict[TaskSplit, int] = {"train": 100, "valid": 5, "test": 8}


def questions(count: int, prefix: str = "q") -> list[Question]:
    return [Question(f"{prefix}{n}?", ("a", "b"), n % 2, f"{prefix}{n}") for n in range(count)]


def test_splits_cut_by_id_share_nothing_and_do_not_depend_on_the_order() -> None:
    given = questions(40)
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


def test_another_id_moves_a_question() -> None:
    renamed = [Question(q.context, q.choices, q.gold, f"x{q.id}") for q in questions(40)]
    before = split_questions({"train": questions(40)}, SIZES)["test"]
    after = split_questions({"train": renamed}, SIZES)["test"]
    assert {q.context for q in before} != {q.context for q in after}


def test_given_splits_stay_and_training_loses_what_a_later_split_asks() -> None:
    test = questions(6)
    found = split_questions({"train": questions(30), "test": test}, SIZES)
    assert {q.id for q in found["test"]} == {q.id for q in test}
    asked = {q.context for part in ("valid", "test") for q in found[part]}  # type: ignore[index]
    assert len(found["valid"]) == 5 and not asked & {q.context for q in found["train"]}
    assert len(found["train"]) == 30 - 6 - 5


def test_a_question_asked_twice_does_not_straddle_a_border() -> None:
    twice = [Question("same?", ("a", "b"), 0, f"id{n}") for n in range(30)]
    splits = split_questions({"train": [*questions(40), *twice]}, SIZES)  # type: ignore[arg-type]
    holders = [name for name, part in splits.items() if any(q.context == "same?" for q in part)]
    assert len(holders) == 1


@pytest.mark.parametrize(
    "given", [{}, {"train": []}, {"train": questions(8)}, {"train": questions(13)}]
)
def test_a_split_that_would_be_empty_is_refused(
    given: dict[TaskSplit, list[Question]],
) -> None:
    with pytest.raises(CorpusError):
        split_questions(given, SIZES)
