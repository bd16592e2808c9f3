"""Answers kept: what merged prompts do to greedy answers, next to other methods at equal saving.

    python -m benchmarks.answers --checkpoint DIR --out docs/results/answers-NAME.json

400 questions of one half (``questions.py``): ``choose`` for the choice of weights, spans, budgets
and tails, ``report`` for what is reported. The base model answers first; an answer is accepted if
it holds one of the question's key words. Of the accepted ones a side keeps those that it answers
with a key word, too; *same* are those whose whole greedy answer is the base model's.

Every method of ``--methods`` is given the saving of the merged prompt: the share of its
layer-tokens, TR (L - k) / L at merge depth k of L layers. Methods of the prompt drop as many tokens
of what the user says, but for the last 16. Methods of the cache read the whole prompt and hold as
many columns less from then on: they save cache alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Final

import numpy as np

from benchmarks.answers.questions import HALVES, LISTS, Question, questions
from benchmarks.common import Benchmark, Report, named_backbone
from benchmarks.timing import device_name
from umim_core import UMIM
from umim_core.backbone.backbone import Backbone
from umim_core.baselines.eviction import generate_evicted
from umim_core.baselines.methods import (
    EvictedColumns,
    Method,
    ReducedTokens,
    Text,
    reduce_tokens,
)
from umim_core.baselines.registry import find_baseline
from umim_core.errors import ConfigError
from umim_core.inference.options import GenerateOptions
from umim_core.inference.prompts import PromptIds
from umim_core.model.inputs import encode_prompts

BASE: Final = "base"
RAW_TAIL: Final = 16
# What both benchmarks of answers load, see load().
SUBJECT: Final[dict[str, object]] = {
    "checkpoint": {"required": True},
    "name": str,
    "backbone": str,
    "budget": float,
    "dtype": {"default": "bfloat16", "choices": ("float32", "bfloat16")},
    "device": "cpu",
    "most": 1000,
}


@dataclass(frozen=True)
class Prompt:
    """A question as the model reads it.

    Attributes:
        ids: Raw ids [T] (int64) of the chat.
        protected: Tokens that every method leaves alone [T] (bool): the template's, and the last of
            what the user says.
        question: Raw ids of the question without its document.
    """

    ids: np.ndarray
    protected: np.ndarray
    question: np.ndarray

    @classmethod
    def of(cls, question: Question, backbone: Backbone) -> Prompt:
        """Return the prompt of a question, as ``UMIM.generate`` reads a chat."""
        chat = [{"role": "user", "content": question.text}]
        prompt = encode_prompts([chat], backbone, None)[0]
        assert isinstance(prompt, PromptIds)
        (first, end) = prompt.parts[0]
        protected = np.ones(len(prompt.ids), dtype=bool)
        protected[first : max(first, end - RAW_TAIL)] = False
        asked = question.text.rpartition("\n\n")[2]
        ids = backbone.require_tokenizer()(asked, add_special_tokens=False)["input_ids"]
        return cls(prompt.ids, protected, np.array(ids, dtype=np.int64))


def shortened(method: ReducedTokens, prompt: Prompt, saving: float) -> np.ndarray:
    """Return the ids [N] that a method of the prompt leaves of it."""
    text = Text(prompt.ids, prompt.protected, prompt.question)
    stays = len(prompt.ids) - round(saving * len(prompt.ids))
    return prompt.ids[reduce_tokens(method.reducer, text, stays)]


def answer_shortened(
    method: Method, prompt: Prompt, saving: float, umim: UMIM, new_tokens: int
) -> tuple[str, float]:
    """Return the greedy answer of the base model under a method, and the realised saving."""
    greedy = GenerateOptions(max_new_tokens=new_tokens, do_sample=False, merge="none")
    gone = round(saving * len(prompt.ids))
    stays = len(prompt.ids) - gone
    if isinstance(method, ReducedTokens):
        left = shortened(method, prompt, saving)
        out = umim.generate(left, greedy)
        return out.text[0], 1 - len(left) / len(prompt.ids)
    if isinstance(method, EvictedColumns):
        row = generate_evicted(
            [prompt.ids],
            greedy.of_model(umim.backbone),
            umim.backbone,
            method.new_policy,
            lambda ids, generated: stays + generated,
        )[0]
        return umim.backbone.decode(row.ids), gone / len(prompt.ids)
    raise ConfigError(
        "a method must drop tokens of the prompt or columns of the cache",
        type(method).__name__,
        "Leave out baselines that merge spans.",
    )


def load(options: argparse.Namespace, report: Report) -> UMIM:
    """Load the checkpoint of ``SUBJECT``'s options and say in the report what it is."""
    load_options = {"dtype": options.dtype, "device": options.device, "budget": options.budget}
    load_options |= named_backbone(options.backbone)
    umim = UMIM.from_pretrained(options.checkpoint, **load_options)
    report["facts"]["device"] = device_name(umim.backbone.device)
    report |= {
        "checkpoint": options.name or Path(options.checkpoint).name,
        "backbone": Path(umim.backbone.name).stem,
        "rules": len(umim.rules),
        "dtype": options.dtype,
    }
    return umim


def run(options: argparse.Namespace, report: Report) -> None:
    """Answer all questions from every side."""
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

    def answer(prompt: object, **asked: object) -> tuple[str, float]:
        out = umim.generate(prompt, max_new_tokens=options.new_tokens, do_sample=False, **asked)
        return out.text[0], out.token_reduction[0]

    def others(question: Question, saving: float) -> dict[str, tuple[str, float]]:
        prompt = Prompt.of(question, umim.backbone)
        return {
            name: answer_shortened(method, prompt, saving, umim, options.new_tokens)
            for name, method in methods.items()
        }

    for which in options.lists:
        rows = []
        for question in questions(which, options.half)[: options.most]:
            share = umim.merged_model.saved_share
            rows.append(_row(question, answer, others, options.raw_tails, share))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        report["lists"][which] = summary(rows)


def _row(
    question: Question,
    answer: Callable[..., tuple[str, float]],
    others: Callable[[Question, float], dict[str, tuple[str, float]]],
    raw_tails: Sequence[int],
    share: float,
) -> Report:
    """Answer one question from every side; merged sides are named by their raw tail."""
    chat = [{"role": "user", "content": question.text}]
    sides = {BASE: (answer(chat, merge="none")[0], 0.0)}
    if question.accepts(sides[BASE][0]):
        for raw_tail in raw_tails:
            text, reduction = answer(chat, merge="prompt", raw_tail=raw_tail)
            sides[f"umim, raw tail {raw_tail}"] = (text, reduction * share)
            if raw_tail == RAW_TAIL:
                sides |= others(question, reduction * share)
    return {
        "id": question.name,
        "sides": {
            name: {"answer": text, "accepted": question.accepts(text), "saving": saving}
            for name, (text, saving) in sides.items()
        },
    }


def summary(rows: Sequence[Mapping[str, object]]) -> Report:
    """Return how many accepted answers each side keeps, at which saving, and all answers."""
    known = [row for row in rows if row["sides"][BASE]["accepted"]]  # type: ignore[index]
    names = list(known[0]["sides"]) if known else []  # type: ignore[call-overload]
    sides = {}
    for name in names:
        own = [row["sides"][name] for row in known]  # type: ignore[index]
        sides[name] = {
            "kept": sum(side["accepted"] for side in own),
            "share": mean(side["accepted"] for side in own),
            "same": mean(
                side["answer"] == row["sides"][BASE]["answer"]  # type: ignore[index]
                for side, row in zip(own, known, strict=True)
            ),
            "saving": mean(side["saving"] for side in own),
        }
    return {
        "questions": len(rows),
        "accepted": len(known),
        "sides": sides,
        "rows": list(rows),
    }


main = Benchmark(
    name="answers",
    doc=__doc__,
    options=SUBJECT
    | {
        "half": {"default": "report", "choices": HALVES},
        "lists": LISTS,
        "raw_tails": [RAW_TAIL],
        "methods": ["truncation"],
        "new_tokens": 40,
    },
    measure=run,
).main


if __name__ == "__main__":
    sys.exit(main())
