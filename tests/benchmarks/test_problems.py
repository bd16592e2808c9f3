"""Problems: when an answer counts, how sides compare, every side's answers on a tiny model."""

from __future__ import annotations

import pytest

from benchmarks.problems import answer_all, figures, solves_word_problem
from umim_core import UMIM

RIGHT = {"answer": "Two and two.\n#### 1,004"}


@pytest.mark.parametrize(
    ("answer", "counts"),
    [
        ("So the answer is 1004.", True),
        ("First 3 apples. The answer is: $1,004.00", True),
        ("12 apples, then 1,004 apples", True),
        ("The Answer is, **1,004**", True),
        ("The answer is 1003, not 1004", False),
        ("The answer is -1004", False),
        ("no number", False),
    ],
)
def test_a_word_problem_counts_by_the_number_that_is_named_or_else_the_last(
    answer: str, counts: bool
) -> None:
    assert solves_word_problem(answer, RIGHT) is counts


def test_points_are_paired_differences_to_the_base_model() -> None:
    solved = {"base": [True, True, False, False], "umim": [True, False, False, False]}
    sides = figures(solved, 0.2, 8)["sides"]
    assert (sides["base"]["solved"], sides["umim"]["solved"]) == (2, 1)
    assert sides["umim"]["points"]["mean"] == -25.0
    assert sides["umim"]["points"]["std"] == pytest.approx(25.0)
    assert sides["base"]["points"] == {"mean": 0.0, "std": 0.0}


def test_every_side_answers_every_problem_in_its_place(tiny_umim: UMIM) -> None:
    texts = ["the of and to in is " * n for n in (9, 5, 7)]
    rows = [{"prompt": text} for text in texts]
    answers, saving = answer_all(tiny_umim, "humaneval", rows, 3, batch_size=2)
    assert set(answers) == {"base", "umim", "truncation"}
    alone = [
        tiny_umim.generate([text], max_new_tokens=3, do_sample=False, merge="none").text[0]
        for text in texts
    ]
    assert answers["base"] == alone
    assert 0.0 <= saving < 1.0
