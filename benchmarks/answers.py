"""Answers kept: what merged prompts do to greedy answers, next to other methods at equal saving.

    python -m benchmarks.answers --checkpoint DIR --out docs/results/answers-NAME.json

800 questions are made by rule: 400 to choose by (``choose``: weights, spans, budgets) and
400 that are only ever reported (``report``). Facts and short tasks stand behind a letter of four
sentences (``chats``), questions on invented places behind two to five pages about such places
(``documents``). Everything follows from ``answers.yaml`` and a seed. Each half has tables, letters
and pages of its own: what is chosen by the first half has not seen the second.

The base model answers first; the other sides answer what it answers with a key word. Every method
of ``--methods`` is given the saving of the merged prompt.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Final, Literal

import numpy as np
import yaml

from benchmarks.runner import Benchmark, Report, tell
from benchmarks.subjects import CHECKPOINT_OPTIONS, load
from umim_core import UMIM
from umim_core.backbone.backbone import Backbone
from umim_core.baselines.eviction import generate_evicted
from umim_core.baselines.methods import EvictedColumns, Method, Text, TokenReducer, reduce_tokens
from umim_core.baselines.registry import find_baseline
from umim_core.errors import ConfigError, require
from umim_core.inference.options import GenerateOptions
from umim_core.model.inputs import encode_prompts
from umim_core.text.template_process import Chat
from umim_core.text.token_ids import encode

Half = Literal["choose", "report"]
HALVES: Final[tuple[Half, ...]] = ("choose", "report")
LISTS: Final = ("chats", "documents")
CHATS: Final = 280  # of a half
DOCUMENTS: Final = 120
BASE: Final = "base"
RAW_TAIL: Final = 16
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


def questions(which: str, half: Half) -> list[Question]:
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


def text_of(asked: str | Chat, backbone: Backbone) -> Text:
    """Return a text, or a chat of one message, as ``UMIM.generate`` reads it.

    Protected are the tokens of a chat's template, and the last of what is said; the question is
    what stands behind the last blank line.
    """
    prompt = encode_prompts([asked], backbone, None)[0]
    said, parts = (asked, None) if isinstance(asked, str) else (asked[0]["content"], prompt.parts)
    first, end = parts[0] if parts else (0, len(prompt.ids))
    protected = np.ones(len(prompt.ids), dtype=bool)
    protected[first : max(first, end - RAW_TAIL)] = False
    question = encode(backbone.require_tokenizer(), said.rpartition("\n\n")[2])
    return Text(prompt.ids, protected, np.array(question, dtype=np.int64))


def shortened(method: TokenReducer, prompt: Text, saving: float) -> np.ndarray:
    """Return the ids [N] that a method of the prompt leaves of it."""
    stays = len(prompt.ids) - round(saving * len(prompt.ids))
    return prompt.ids[reduce_tokens(method, prompt, stays)]


def answer_shortened(
    method: Method, prompt: Text, saving: float, umim: UMIM, new_tokens: int
) -> tuple[str, float]:
    """Return the greedy answer of the base model under a method, and the realised saving."""
    greedy = GenerateOptions(max_new_tokens=new_tokens, do_sample=False, merge="none")
    tokens, backbone = len(prompt.ids), umim.backbone
    if isinstance(method, TokenReducer):
        left = shortened(method, prompt, saving)
        return umim.generate(left, greedy).text[0], 1 - len(left) / tokens
    rule = "a method must drop tokens of the prompt or columns of the cache"
    remedy = "Leave out baselines that merge spans."
    evicts = isinstance(method, EvictedColumns)
    require(evicts, ConfigError, rule, type(method).__name__, remedy)
    stays = tokens - round(saving * tokens)
    (row,) = generate_evicted(
        [prompt.ids],
        greedy.of_model(backbone),
        backbone,
        method.new_policy,
        [lambda generated: stays + generated],
    )
    return backbone.decode(row.ids), 1 - stays / tokens


def run(options: argparse.Namespace, report: Report) -> None:
    umim = load(options, report)
    report |= {
        "form": umim.checkpoint.config.form(),
        "half": options.half,
        "new_tokens": options.new_tokens,
        "lists": {},
    }
    methods = {
        name: find_baseline(name).make(umim.backbone, umim.matcher) for name in options.methods
    }
    for which in options.lists:
        rows = []
        for question in questions(which, options.half)[: options.most]:
            rows.append(answer_all(question, umim, methods, options))
            tell(json.dumps(rows[-1]))
        report["lists"][which] = summary(rows)


def answer_all(
    question: Question, umim: UMIM, methods: dict[str, Method], options: argparse.Namespace
) -> Report:
    chat = [{"role": "user", "content": question.text}]

    def answer(**how: Any) -> tuple[str, float]:
        out = umim.generate(chat, max_new_tokens=options.new_tokens, do_sample=False, **how)
        return out.text[0], out.token_reduction[0] * umim.merged_model.saved_share

    sides = {BASE: (answer(merge="none")[0], 0.0)}
    if question.accepts(sides[BASE][0]):
        merged = answer(merge="prompt", raw_tail=RAW_TAIL)
        sides[f"umim, raw tail {RAW_TAIL}"] = merged
        prompt = text_of(chat, umim.backbone)
        for name, method in methods.items():
            sides[name] = answer_shortened(method, prompt, merged[1], umim, options.new_tokens)
    return {
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
    | {
        "half": {"default": "report", "choices": HALVES},
        "lists": LISTS,
        "methods": ["truncation"],
        "new_tokens": 40,
    },
    measure=run,
)


if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
