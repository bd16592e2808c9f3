"""``umim task-text``: texts like a generated task's prompts, drawn apart from what is scored."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from umim_core.cli.console_output import JsonFlag, emit


def task_text(
    name: Annotated[str, typer.Argument(help="A generated task, e.g. umim_ruler_4k.")],
    tokenizer: Annotated[str, typer.Option(help="The backbone, or its tokenizer's directory.")],
    out: Annotated[Path, typer.Option(help="File of JSON lines to write.")],
    questions: Annotated[int, typer.Option(min=1, help="Prompts to write.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Seed of what is drawn.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Write prompts of a task's training split, to mine rules from and to train on.

    The split is drawn apart from the scored one, whatever the seed. Each line holds one prompt with
    its answers as `text`.
    """
    from umim_core.backbone.tokenizer_files import load_tokenizer
    from umim_core.embedded.documents import write_rows
    from umim_core.task_sets.generation_rows import make_rows
    from umim_core.task_sets.generation_spec import GENERATION_TASKS
    from umim_core.task_sets.task_options import TaskOptions

    task = GENERATION_TASKS.find(name)
    options = TaskOptions(task_seed=seed, task_questions=questions)
    rows = make_rows(task, options, load_tokenizer(tokenizer), "train")
    parts = [(row["prompt"], row["answer_prefix"], ", ".join(row["references"])) for row in rows]
    write_rows(out, [{"text": " ".join(filter(None, texts))} for texts in parts])
    count = sum(row["prompt_tokens"] for row in rows)
    mine = ["umim", "mine", str(out), "--field", "text", "--tokenizer", tokenizer, "--out", "rules"]
    lines = [f"{len(rows)} texts, {count:,} tokens: {out}", f"Next: {shlex.join(mine)}"]
    emit({"task": name, "texts": len(rows), "tokens": count, "out": str(out)}, lines, as_json)
