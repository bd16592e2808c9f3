"""Multi-document question answering: one of many documents answers, at every position.

Each document is about an invented place with a founder, a year and a town that no other document of
the prompt has; the question asks for one of the three, of one place. The position of the document
that answers goes through the prompt evenly from question to question.

Source: Lost in the Middle (Liu et al., 2024): prompt, documents with titles, one with the answer,
substring match. Its documents are from Wikipedia; ours are generated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Final

from umim_core.task_sets.generation_spec import GenerationSet, Wish, add_generation_task
from umim_core.task_sets.prompt_filling import inserted, sentences, words

THOUSANDS: Final = (2, 4, 8, 16)
_STEMS: Final = words(
    "Alder Ash Beck Birch Brack Brook Calder Clay Cress Dun East Elder Fallow Fen Glen Harl "
    "Hazel Heath Kell Lark Linden Marl Mere Moor North Oak Orrin Pen Quarr Raven Rook Sedge "
    "Stan Thorn Wend West Whin Wick Wren Yar"
)
_ENDS: Final = words("bridge by combe dale field ford ham hurst ley mouth ness stead ton well wick")
_KINDS: Final = words(
    "Observatory;Museum;Library;School;Hospital;Theatre;Mill;Bank;Chapel;Brewery;Foundry;"
    "Garden;Lighthouse;Printing House;Orchestra",
    ";",
)
_FIRST: Final = words(
    "Ada Agnes Albert Alice Arthur Bertha Clara Conrad Dora Edith Edgar Emil Esther Felix Flora "
    "Frida Georg Hanna Harold Hugo Ida Irene Jonas Julia Karl Laura Leo Marta Nora Oscar Paula "
    "Rosa Ruth Simon Stella Theo Vera Victor Walter Wilma"
)
_LAST: Final = words(
    "Abel Bauer Brandt Carver Cole Dalton Ebner Fisk Garner Hale Hartmann Ivers Jansen Keller "
    "Lang Lowe Maier Marsh Nolan Olsen Pryce Quinn Reed Rhodes Sander Sharp Stone Tanner Thorne "
    "Ulrich Vance Vogel Wade Weller Wolf Yates Young Zeller"
)
_YEARS: Final = range(1500, 2000)
_STEP: Final = 0.6180339887  # multiples modulo 1 lie evenly, however many there are


@dataclass(frozen=True)
class _Place:
    """An invented place and its facts."""

    title: str
    founder: str
    year: str
    town: str

    def document(self, rng: Random, filler: Iterator[str]) -> str:
        facts = [
            f"The {self.title} was founded by {self.founder}.",
            f"It opened in {self.year}.",
            f"The building of the {self.title} stands in {self.town}.",
        ]
        rng.shuffle(facts)
        between = [next(filler) for _ in facts]
        text = " ".join(text for pair in zip(facts, between, strict=True) for text in pair)
        return f"(Title: {self.title}) {text}"

    def question(self, rng: Random) -> tuple[str, str]:
        """Return a question and its answer."""
        return rng.choice(
            (
                (f"Who founded the {self.title}?", self.founder),
                (f"In which year did the {self.title} open?", self.year),
                (f"In which town is the building of the {self.title}?", self.town),
            )
        )


def one_document_answers(wish: Wish, number: int) -> tuple[Mapping[str, str], Sequence[str]]:
    """Return a question with the number of the document that answers it."""
    rng = wish.generator(number)
    places, filler = _places(rng), sentences(rng)
    gold = next(places)
    answering = gold.document(rng, filler)
    question, answer = gold.question(rng)
    depth = (0.5 + number * _STEP) % 1
    others = (place.document(rng, filler) for place in places)
    return wish.filled(others, partial(_fields, answering, question, depth)), [answer]


def _fields(answering: str, question: str, depth: float, others: Sequence[str]) -> dict[str, str]:
    texts = inserted(others, [answering], [depth])
    return {
        "documents": "\n\n".join(f"Document [{n}]{text}" for n, text in enumerate(texts, 1)),
        "question": question,
        "position": f"{texts.index(answering) + 1} of {len(texts)}",
    }


def _places(rng: Random) -> Iterator[_Place]:
    """Yield places without a common fact; there are 500, some 40,000 tokens."""
    titles = rng.sample([(stem, kind) for stem in _STEMS for kind in _KINDS], len(_YEARS))
    founders = rng.sample([(first, last) for first in _FIRST for last in _LAST], len(_YEARS))
    towns = rng.sample([f"{stem}{end}" for stem in _STEMS for end in _ENDS], len(_YEARS))
    years = rng.sample(_YEARS, len(_YEARS))
    for (stem, kind), (first, last), town, year in zip(titles, founders, towns, years, strict=True):
        yield _Place(f"{stem} {kind}", f"{first} {last}", str(year), town)


for _thousand in THOUSANDS:
    add_generation_task(
        GenerationSet(
            name=f"umim_multidoc_{_thousand}k",
            prompt=(
                "Write a high-quality answer for the given question using only the provided search "
                "results (some of which might be irrelevant).\n\n{documents}\n\n"
                "Question: {question}\nAnswer:"
            ),
            question="{question}",
            make=one_document_answers,
            version=1,
            metrics=("substring_match", "exact_match"),
            max_new_tokens=32,
            until=("\n",),
            length=1024 * _thousand,
        )
    )
