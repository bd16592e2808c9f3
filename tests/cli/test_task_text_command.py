"""``umim task-text``: texts of a generated task's training split."""

from __future__ import annotations

import json
from pathlib import Path

from support.command_line import Umim
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.task_sets.generation_spec import GENERATION_TASKS, TaskOptions, make_rows

BACKBONE = "umim-docs-llama"


def test_texts_hold_answers_and_are_none_of_the_scored_prompts(umim: Umim, tmp_path: Path) -> None:
    out = tmp_path / "texts.jsonl"
    arguments = ("task-text", "umim_ruler_1k", "--tokenizer", BACKBONE, "--questions", "2")
    done = umim(*arguments, "--out", out, "--json")
    assert json.loads(done.out)["texts"] == 2
    texts = [json.loads(line)["text"] for line in out.read_text("utf-8").splitlines()]
    tokenizer = load_tokenizer(BACKBONE)
    options = TaskOptions(task_questions=2)
    for split, there in (("train", True), ("test", False)):
        rows = make_rows(GENERATION_TASKS.find("umim_ruler_1k"), options, tokenizer, split)
        found = [f"{r['prompt']} {r['answer_prefix']} {', '.join(r['references'])}" for r in rows]
        assert (found == texts) == there
        assert bool(set(found) & set(texts)) == there
