"""Answers kept: what merged prompts do to greedy answers, next to truncation at equal saving.

    python -m benchmarks.answers --checkpoint DIR --out docs/results/answers-NAME.json

800 questions are made by rule: 400 to choose by (``choose``: weights, spans, budgets) and
400 that are only ever reported (``report``). Facts and short tasks stand behind a letter of four
sentences (``chats``), questions on invented places behind two to five pages about such places
(``documents``). Everything follows from ``answers.yaml`` and a seed. Each half has tables, letters
and pages of its own: what is chosen by the first half has not seen the second.

The base model answers first; the other sides answer what it answers with a key word.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from statistics import mean
from typing import Any, Final

import yaml

from benchmarks.answering import ASKED, CHECKPOINT_OPTIONS, RAW_TAIL, answer, answer_shorter, load
from benchmarks.runner import Benchmark, Report
from umim_core import UMIM

HALVES: Final = ("choose", "report")
LISTS: Final = ("chats", "documents")
CHATS: Final = 280  # of a half
DOCUMENTS: Final = 120
NEW: Final = 40  # tokens of an answer
BASE, MERGED = "base", f"umim, raw tail {RAW_TAIL}"
Asked = tuple[str, str, tuple[str, ...]]  # source, question, keys


@dataclass(frozen=True)
class Question:
    """What the user says, and the lower-case words of which a right answer holds one."""

    name: str  # half, list, source and number: report-chats-capitals-3
    text: str
    keys: tuple[str, ...]

    def accepts(self, answer: str) -> bool:
        """Return whether an answer holds a key as whole words."""
        return any(re.search(rf"\b{re.escape(key)}\b", answer.lower()) for key in self.keys)


def questions(which: str, half: str) -> list[Question]:
    """Return the questions of one list, ``chats`` or ``documents``, of one half."""
    tables = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))[half]
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


def run(options: argparse.Namespace, report: Report) -> None:
    umim = load(options, report, "user")
    report |= {"form": umim.checkpoint.config.form(), "half": options.half, "new_tokens": NEW}
    report["lists"] = {}
    for which in LISTS:
        asked = questions(which, options.half)[: options.most]
        report["lists"][which] = summary(list(answer_all(asked, umim, options)))


def answer_all(asked: list[Question], umim: UMIM, options: argparse.Namespace) -> Iterator[Report]:
    """Answer questions, and those that the base model knows from shorter prompts, too."""
    chats = [[{"role": "user", "content": question.text}] for question in asked]
    base, _ = answer(umim, chats, "none", NEW, options)
    right = [question.accepts(text) for question, text in zip(asked, base, strict=True)]
    shorter, savings = answer_shorter(umim, list(compress(chats, right)), NEW, options)
    of_known = zip(shorter["umim"], shorter["truncation"], savings, strict=True)
    for question, text, known in zip(asked, base, right, strict=True):
        sides = {BASE: (text, 0.0)}
        if known:
            merged, truncated, saving = next(of_known)
            sides |= {MERGED: (merged, saving), "truncation": (truncated, saving)}
        yield {
            "id": question.name,
            "sides": {
                name: {"answer": text, "accepted": question.accepts(text), "saving": saving}
                for name, (text, saving) in sides.items()
            },
        }


def summary(rows: list[Report]) -> Report:
    """Return how many accepted answers each side keeps, at which saving, and all answers."""
    known = [row["sides"] for row in rows if row["sides"][BASE]["accepted"]]
    sides = {
        name: {
            "kept": sum(row[name]["accepted"] for row in known),
            "share": mean(row[name]["accepted"] for row in known),
            "same": mean(row[name]["answer"] == row[BASE]["answer"] for row in known),
            "saving": mean(row[name]["saving"] for row in known),
        }
        for name in (known[0] if known else ())
    }
    return {"questions": len(rows), "accepted": len(known), "sides": sides, "rows": rows}


BENCHMARK: Final = Benchmark(
    options=CHECKPOINT_OPTIONS
    | ASKED
    | {"batch_size": 1, "half": {"default": "report", "choices": HALVES}},
    measure=run,
)


if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
