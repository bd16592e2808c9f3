"""Final answers of worked solutions."""

from __future__ import annotations

import pytest

from umim_core.evaluation.text_metrics.math_answer import final_answer, math_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"First \boxed{3}, then \boxed{1{,}024}.", "1024"),
        (r"so it is \boxed{\text{ 7 }} of 9", "7"),
        (r"\boxed{\frac{1}{2}} not 3", r"\frac{1}{2}"),
        (r"closed \boxed{5} and open \boxed{6", "5"),
        ("They pay 3 * 6 = $18.00.", "18"),
        ("#### 1,000", "1000"),
        ("from 10 to -4", "-4"),
        ("I do not know", None),
        ("", None),
    ],
)
def test_the_last_box_counts_else_the_last_number(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


def test_answers_are_compared_by_value() -> None:
    row = {"references": ["They have 6 * 3 = 18 in all. #### 18"]}
    texts = ["It is 18.0", "It is 17", r"\boxed{+18}", "none at all"]
    assert math_answer(texts, row) == {"pass@1": 0.5, "pass@4": 1.0}
