"""RULER four-needle retrieval: four values of one key, hidden in text of 1K to 16K tokens.

    ... filler. One of the special magic numbers for pale-anchor is: 4023117. filler ...   (4 times)
    What are all the special magic numbers for pale-anchor mentioned in the provided text?

The score is the share of the four values that the answer holds. Keys, values, depths and filler are
drawn from seed, split, task and number of the question. Values are numbers or words: checkpoints
that merge no digit copy numbers token by token, but a word such as calm-ferry may be merged.

Source: RULER (Hsieh et al., 2024), ``niah_multivalue`` with ``type_needle_v`` numbers and words:
template, needle, lengths with 128 tokens of answer, ``string_match_all``. Its filler are essays,
which lm-eval's own task reads from the hub; ours is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Final, Literal

from umim_core.task_sets.generation_spec import GenerationSet, Wish, add_generation_task
from umim_core.task_sets.prompt_filling import ADJECTIVES, NOUNS, inserted, sentences

ValueKind = Literal["numbers", "words"]

NEEDLES: Final = 4
NEEDLE: Final = "One of the special magic {kind} for {key} is: {value}."
THOUSANDS: Final[dict[ValueKind, tuple[int, ...]]] = {"numbers": (1, 2, 4, 8, 16), "words": (1, 4)}
_PREFIX: Final[dict[ValueKind, str]] = {"numbers": "umim_ruler", "words": "umim_ruler_words"}


def four_needles(
    kind: ValueKind, wish: Wish, number: int
) -> tuple[Mapping[str, str], Sequence[str]]:
    """Return a question with the depths of its needles (0 begin .. 1 end)."""
    rng = wish.generator(number)
    key = f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
    if kind == "numbers":
        values = [str(value) for value in rng.sample(range(10**6, 10**7), NEEDLES)]
    else:
        pairs = ("-".join(pair) for pair in product(ADJECTIVES, NOUNS))
        values = rng.sample([pair for pair in pairs if pair != key], NEEDLES)
    depths = [rng.random() for _ in values]
    return wish.filled(sentences(rng), partial(_fields, kind, key, values, depths)), values


def _fields(
    kind: ValueKind,
    key: str,
    values: Sequence[str],
    depths: Sequence[float],
    taken: Sequence[str],
) -> dict[str, str]:
    needles = [NEEDLE.format(kind=kind, key=key, value=value) for value in values]
    return {
        "context": " ".join(inserted(taken, needles, depths)),
        "key": key,
        "depths": " ".join(f"{depth:.3f}" for depth in depths),
    }


def _task(kind: ValueKind, thousand: int) -> GenerationSet:
    question = f"What are all the special magic {kind} for {{key}} mentioned in the provided text?"
    return GenerationSet(
        name=f"{_PREFIX[kind]}_{thousand}k",
        prompt=(
            f"Some special magic {kind} are hidden within the following text. Make sure to "
            f"memorize it. I will quiz you about the {kind} afterwards.\n{{context}}\n{question}"
        ),
        question=question,
        answer_prefix=f"The special magic {kind} for {{key}} mentioned in the provided text are",
        make=partial(four_needles, kind),
        version=1,
        metrics=("recall",),
        max_new_tokens=128,
        length=1024 * thousand,
    )


for _kind, _thousands in THOUSANDS.items():
    for _thousand in _thousands:
        add_generation_task(_task(_kind, _thousand))
