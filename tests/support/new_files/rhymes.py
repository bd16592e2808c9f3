"""A task that brings its own questions: all that a new task needs is a file like this one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from umim_core.config.model_base import SPLITS, Split
from umim_core.task_sets.spec import QuestionForm, TaskSet, add_task

_WORDS = ("light", "house", "stone", "chair", "train", "bread")


def write(out: Path, sizes: Mapping[Split, int] | None, _: Path | None) -> None:
    """Ask which of two words rhymes with a third."""
    for split, size in (sizes or dict.fromkeys(SPLITS, len(_WORDS))).items():
        rows = []
        for number in range(size):
            word = _WORDS[number % len(_WORDS)]
            context = f"Returns the number of nodes in the graph of the word {word}. " * 2
            choices = [f"the word f{word[1:]}", f"the word {word}er"]
            rows.append(json.dumps({"context": context, "choices": choices, "gold": number % 2}))
        (out / f"{split}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


add_task(
    TaskSet(
        name="rhymes",
        write=write,
        chance=0.5,
        form=QuestionForm("Question: {context}\nAnswer:"),
        metrics=("acc", "acc_tok"),
        sources=lambda: [["words", "1"]],
    )
)
