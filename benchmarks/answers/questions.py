"""800 questions made by rule: 400 to choose by and 400 that are only ever reported.

Facts and short tasks stand behind a letter of four sentences (``chats``), questions on invented
places behind two to five pages about such places (``documents``). Everything follows from
``tables.yaml`` and a seed. Each half has tables, letters and pages of its own: what is chosen by
the first half has not seen the second.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import yaml

Half = Literal["choose", "report"]
HALVES: Final[tuple[Half, ...]] = ("choose", "report")
LISTS: Final = ("chats", "documents")
CHATS: Final = 280  # of a half
DOCUMENTS: Final = 120
Asked = tuple[str, str, tuple[str, ...]]  # source, question, keys


@dataclass(frozen=True)
class Question:
    """A question, and the words of which a right answer holds one.

    Attributes:
        name: Half, list, source and number: ``report-chats-capitals-3``.
        text: What the user says.
        keys: Lower-case words or phrases.
    """

    name: str
    text: str
    keys: tuple[str, ...]

    def accepts(self, answer: str) -> bool:
        """Return whether an answer holds a key as whole words."""
        return any(re.search(rf"\b{re.escape(key)}\b", answer.lower()) for key in self.keys)


def questions(which: str, half: Half) -> list[Question]:
    """Return the questions of one list, ``chats`` or ``documents``, of one half."""
    tables = yaml.safe_load((Path(__file__).parent / "tables.yaml").read_text("utf-8"))[half]
    draw = random.Random(f"{which} {half}")  # of a text: the same draws on every machine
    if which == "documents":
        asked = list(_documents(tables["pages"], draw))
    else:
        tasks = [*_facts(tables["facts"]), *_tasks(tables["which"], draw)]
        draw.shuffle(tasks)
        asked = [
            (source, " ".join([*map(draw.choice, tables["letters"]), text]), keys)
            for source, text, keys in (tasks * 2)[:CHATS]  # a fact twice, behind another letter
        ]
    return [
        Question(f"{half}-{which}-{source}-{number}", text, keys)
        for number, (source, text, keys) in enumerate(asked)
    ]


def _facts(tables: dict[str, dict[str, str]]) -> Iterator[Asked]:
    for source, table in tables.items():
        for entry in table["answers"].split("; "):
            thing, answers = entry.split(": ")
            yield source, table["asked"].format(thing), tuple(answers.lower().split(" or "))


def _tasks(which: dict[str, Any], draw: random.Random) -> Iterator[Asked]:
    """Give tasks that need words alone: which of three is of a kind, who has which of two."""
    kinds = {kind: things.split() for kind, things in which["kinds"].items()}
    for kind, things in kinds.items():
        others = [thing for other in kinds.values() for thing in other if thing not in things]
        for thing in things:
            three = [thing, *draw.sample(others, 2)]
            draw.shuffle(three)
            yield "kinds", which["asked"].format(kind, *three), (thing,)
    for _ in range(CHATS // 4):
        two = draw.sample([thing for things in kinds.values() for thing in things], 2)
        yield "pairs", which["pair"].format(*two), (two[1],)


def _documents(pages: dict[str, Any], draw: random.Random) -> Iterator[Asked]:
    """Give questions on one of several pages, each about a place of its own."""
    first, *others = pages["sentences"]
    for _ in range(DOCUMENTS):
        places = draw.sample(pages["names"], draw.choice((2, 3, 4, 5)))
        place, source = draw.choice(places), draw.choice(list(pages["facts"]))
        written, key = [], ""
        for name in places:
            sentences = list(others)
            for fact, table in pages["facts"].items():
                value = draw.choice(table["values"].split("; "))
                sentences.append(table["told"].format(value))
                key = value.lower() if (name, fact) == (place, source) else key
            draw.shuffle(sentences)
            written.append(" ".join([first, *sentences]).replace("{place}", name))
        asked = pages["facts"][source]["asked"].replace("{place}", place)
        text = "\n\n".join([*written, f"Answer in one short sentence: {asked}"])
        yield source, text, tuple({key: None, key.split()[-1]: None})
