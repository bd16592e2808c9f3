from __future__ import annotations

from dataclasses import replace
from itertools import islice
from random import Random

import pytest

from support.counted_texts import count
from umim_core.errors import EvaluationError
from umim_core.task_sets.generation_spec import Wish
from umim_core.task_sets.prompt_filling import filled, inserted, sentences

WISH = Wish(
    task="umim_own",
    questions=1,
    room=200,
    size=lambda fields: count(f"Q: {fields['text']}?"),
    count=count,
    seed=0,
    split="test",
)


@pytest.mark.parametrize("room", [40, 200, 1000])
def test_a_prompt_is_filled_until_no_further_unit_fits(room: int) -> None:
    wish = replace(WISH, room=room)
    fields = filled(wish, sentences(Random(1)), lambda taken: {"text": " ".join(taken)})
    longest = max(count(text) for text in islice(sentences(Random(1)), 40))
    assert room - 2 * longest <= wish.size(fields) <= room


def test_a_prompt_that_is_too_long_without_units_is_refused() -> None:
    with pytest.raises(EvaluationError, match="must fit into its length; got room for 3 tokens"):
        filled(replace(WISH, room=3), iter(()), lambda _: {"text": "the cat sat on the mat"})


def test_what_is_inserted_stands_at_its_depth() -> None:
    assert inserted("abcd", "123", [1.0, 0.0, 0.5]) == ["2", "a", "b", "3", "c", "d", "1"]
    assert inserted("", "12", [0.9, 0.1]) == ["1", "2"]
    assert inserted("ab", "12", [0.5, 0.5]) == ["a", "1", "2", "b"]
