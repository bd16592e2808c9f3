"""Answers kept: what merged prompts do to greedy answers, next to truncation at equal saving.

    python -m benchmarks.answers --checkpoint DIR --out docs/results/answers-NAME.json

50 chats and 20 questions on documents of 600 to 3,000 tokens (``chats.jsonl``,
``document_questions.jsonl``; written for this list). The base model answers first; an answer is
accepted if it holds one of the question's key words. Of the accepted ones a side keeps those that
it answers with a key word, too.

Truncation drops the first tokens of what the user says, as many as make the same saving: the share
of layer-tokens of the prompt, TR (L - k) / L at merge depth k of L layers.
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

from benchmarks.common import Benchmark, Report
from umim_core import UMIM
from umim_core.inference.prompts import PromptIds
from umim_core.model.inputs import encode_prompts

HERE: Final = Path(__file__).parent
LISTS: Final = ("chats", "documents")
BASE: Final = "base"
_RAW_TAIL: Final = 16


@dataclass(frozen=True)
class Question:
    """One question."""

    name: str
    text: str
    keys: tuple[str, ...]

    def accepts(self, answer: str) -> bool:
        """Return whether an answer holds a key word."""
        return any(key in answer.lower() for key in self.keys)


def questions(which: str) -> list[Question]:
    """Return a list: ``chats`` or ``documents``."""
    if which == "chats":
        return [Question(q["id"], q["content"], tuple(q["keys"])) for q in _lines("chats.jsonl")]
    documents = json.loads((HERE / "documents.json").read_text("utf-8"))
    found = []
    for q in _lines("document_questions.jsonl"):
        texts = "\n\n".join(documents[name] for name in q["documents"])
        asked = f"{texts}\n\nAnswer in one short sentence: {q['question']}"
        found.append(Question(q["id"], asked, tuple(q["keys"])))
    return found


def _lines(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (HERE / name).read_text("utf-8").splitlines()]


def truncated(prompt: PromptIds, tokens: int) -> np.ndarray:
    """Return a prompt without the first tokens of what the user says, but for the last one."""
    first, end = prompt.parts[0]
    gone = min(tokens, end - first - 1)
    return np.concatenate([prompt.ids[:first], prompt.ids[first + gone :]])


def run(options: argparse.Namespace, report: Report) -> None:
    """Answer all questions from every side."""
    given = {"dtype": options.dtype} | _named(options.backbone)
    umim = UMIM.from_pretrained(options.checkpoint, **given)
    layers, depth = umim.backbone.num_layers, umim.checkpoint.config.merge_depth
    report |= {
        "checkpoint": options.name or Path(options.checkpoint).name,
        "backbone": Path(umim.backbone.name).stem,
        "form": umim.checkpoint.config.form(),
        "rules": len(umim.rules),
        "dtype": options.dtype,
        "new_tokens": options.new_tokens,
        "lists": {},
    }

    def answer(prompt: object, **asked: object) -> tuple[str, float]:
        made = umim.generate(prompt, max_new_tokens=options.new_tokens, do_sample=False, **asked)
        return made.text[0], made.token_reduction[0]

    for which in options.lists:
        rows = []
        for question in questions(which)[: options.most]:
            rows.append(_row(question, umim, answer, options.raw_tails, (layers - depth) / layers))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        report["lists"][which] = summary(rows)


def _named(backbone: str | None) -> dict[str, str]:
    """Return the option that says where a checkpoint's backbone lies, where it is given."""
    return {} if backbone is None else {"backbone": backbone}


def _row(
    question: Question,
    umim: UMIM,
    answer: Callable[..., tuple[str, float]],
    raw_tails: Sequence[int],
    share: float,
) -> Report:
    """Answer one question from every side; merged sides are named by their raw tail."""
    chat = [{"role": "user", "content": question.text}]
    prompt = encode_prompts([chat], umim.backbone, None)[0]
    assert isinstance(prompt, PromptIds)
    text, _ = answer(chat, merge="none")
    row: Report = {
        "id": question.name,
        "tokens": len(prompt.ids),
        "sides": {BASE: {"answer": text, "accepted": question.accepts(text), "saving": 0.0}},
    }
    if not question.accepts(text):
        return row
    for raw_tail in raw_tails:
        text, reduction = answer(chat, merge="prompt", raw_tail=raw_tail)
        saving = reduction * share
        sides = {f"umim, raw tail {raw_tail}": (text, saving)}
        if raw_tail == _RAW_TAIL:
            ids = truncated(prompt, round(saving * len(prompt.ids)))
            sides["truncation"] = (answer(ids, merge="none")[0], 1 - len(ids) / len(prompt.ids))
        row["sides"] |= {
            name: {"answer": said, "accepted": question.accepts(said), "saving": saved}
            for name, (said, saved) in sides.items()
        }
    return row


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
            "saving": mean(side["saving"] for side in own),
        }
    return {
        "questions": len(rows),
        "accepted": len(known),
        "tokens": mean(row["tokens"] for row in rows),  # type: ignore[misc]
        "sides": sides,
        "rows": list(rows),
    }


main = Benchmark(
    name="answers",
    doc=__doc__,
    options={
        "checkpoint": {"required": True},
        "name": str,
        "backbone": str,
        "lists": LISTS,
        "raw_tails": [_RAW_TAIL, 0],
        "dtype": {"default": "bfloat16", "choices": ("float32", "bfloat16")},
        "new_tokens": 40,
        "most": 1000,
    },
    measure=run,
).main


if __name__ == "__main__":
    sys.exit(main())
