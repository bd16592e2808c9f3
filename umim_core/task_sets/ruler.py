"""RULER four-needle retrieval: four values of one key, hidden in text of 1K to 16K tokens.

    ... filler. One of the special magic numbers for pale-anchor is: 4023117. filler ...   (4 times)
    What are all the special magic numbers for pale-anchor mentioned in the provided text?

The score is the share of the four values that the answer holds. Keys, values, depths and filler are
drawn from seed, split, task and number of the question.

Source: RULER (Hsieh et al., 2024), ``niah_multivalue``: template, needle, lengths with 128 tokens
of answer, ``string_match_all``. Its filler are essays, which lm-eval's own
task reads from the hub; ours is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from umim_core.task_sets.generation_spec import (
    GenerationQuestion,
    GenerationSet,
    Wish,
    add_generation_task,
)
from umim_core.task_sets.prompt_filling import (
    ADJECTIVES,
    NOUNS,
    filled,
    generator,
    inserted,
    sentences,
)

NEEDLES: Final = 4
NEEDLE: Final = "One of the special magic numbers for {key} is: {value}."
THOUSANDS: Final = (1, 2, 4, 8, 16)


def four_needles(wish: Wish) -> Iterator[GenerationQuestion]:
    """Yield the questions of a wish, each with the depths of its needles (0 begin .. 1 end)."""
    for number in range(wish.questions):
        rng = generator(wish, number)
        key = f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
        values = [str(value) for value in rng.sample(range(10**6, 10**7), NEEDLES)]
        depths = [rng.random() for _ in values]
        fields = filled(wish, sentences(rng), partial(_fields, key, values, depths))
        yield GenerationQuestion(str(number), fields, tuple(values))


def _fields(
    key: str, values: Sequence[str], depths: Sequence[float], taken: Sequence[str]
) -> dict[str, str]:
    needles = [NEEDLE.format(key=key, value=value) for value in values]
    return {
        "context": " ".join(inserted(taken, needles, depths)),
        "key": key,
        "depths": " ".join(f"{depth:.3f}" for depth in depths),
    }


for _thousand in THOUSANDS:
    add_generation_task(
        GenerationSet(
            name=f"umim_ruler_{_thousand}k",
            prompt=(
                "Some special magic numbers are hidden within the following text. Make sure to "
                "memorize it. I will quiz you about the numbers afterwards.\n{context}\n"
                "What are all the special magic numbers for {key} mentioned in the provided text?"
            ),
            question=(
                "What are all the special magic numbers for {key} mentioned in the provided text?"
            ),
            answer_prefix=(
                "The special magic numbers for {key} mentioned in the provided text are"
            ),
            make=four_needles,
            version=1,
            metrics=("recall",),
            max_new_tokens=128,
            length=1024 * _thousand,
        )
    )
