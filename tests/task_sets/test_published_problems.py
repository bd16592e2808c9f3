"""Tasks of published problems: prompts and answers from hand-made files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.evaluation.conftest import byte_tokenizer
from umim_core.errors import CorpusError
from umim_core.evaluation.text_metrics.math_answer import math_answer
from umim_core.task_sets.generation_rows import Row, exceeds, make_rows
from umim_core.task_sets.generation_spec import GENERATION_TASKS
from umim_core.task_sets.task_files import DataFile
from umim_core.task_sets.task_options import TaskOptions
from umim_core.task_sets.text_tokens import TextTokens

TOKENS = TextTokens(byte_tokenizer())
CODE = {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "def check(c): ..."}
LINES = {
    "umim_humaneval": CODE | {"entry_point": "f", "canonical_solution": "    return 1\n"},
    "umim_aime24": {"id": "I-1", "problem": "Find $x$.", "answer": "204"},
    "umim_amc23": {"id": "12A-1", "problem": "Find $x$.", "answer": "27"},
    "umim_gsm8k": {"id": "1", "problem": "How many?", "answer": "18", "solution": ""},
    "umim_cnn_dailymail": {"id": "1", "article": "News. " * 200, "highlights": "All of it."},
}


def row_of(name: str, folder: Path, line: dict[str, str], context: int | None = None) -> Row:
    source = GENERATION_TASKS.find(name).source
    assert isinstance(source, DataFile)
    path = folder / source.path
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(line) + "\n", "utf-8")
    options = TaskOptions(task_data=str(folder))
    (row,) = make_rows(GENERATION_TASKS.find(name), options, TOKENS, context)
    return row


@pytest.mark.parametrize(
    ("name", "prompt", "reference"),
    [
        ("umim_humaneval", "def f():\n", "    return 1\n"),
        (
            "umim_aime24",
            "Find $x$.\nLet's think step by step and output the final answer within \\boxed{}.\n",
            "204",
        ),
        ("umim_gsm8k", "Q: How many?\nA: Let's think step by step.", "18"),
    ],
)
def test_a_line_becomes_prompt_and_answer(
    tmp_path: Path, name: str, prompt: str, reference: str
) -> None:
    row = row_of(name, tmp_path, LINES[name])
    assert (row["prompt"], row["references"]) == (prompt, [reference])
    assert row["id"] == LINES[name].get("id", "HumanEval/0")


def test_an_article_is_cut_to_the_context_and_its_request_stays(tmp_path: Path) -> None:
    row = row_of("umim_cnn_dailymail", tmp_path, LINES["umim_cnn_dailymail"], context=512)
    assert row["cut_tokens"] > 0
    assert row["prompt"].startswith("Summarize the following article:\n\nNews.")
    assert row["prompt"].endswith("News. \n\nSummary:")


def test_the_papers_length_of_answers_is_not_run_where_it_does_not_fit(tmp_path: Path) -> None:
    task = GENERATION_TASKS.find("umim_amc23")
    rows = [row_of(task.name, tmp_path, LINES[task.name])]
    assert (task.repeats, task.max_new_tokens) == (16, 15_000)
    assert exceeds(task, TaskOptions(), 8192, rows)
    assert not exceeds(task, TaskOptions(task_new_tokens=1024), 8192, rows)


def test_the_hubs_answer_of_gsm8k_is_read_as_the_files(tmp_path: Path) -> None:
    published = LINES["umim_gsm8k"] | {"answer": "Half of 36 is <<36/2=18>>18.\n#### 18"}
    row = row_of("umim_gsm8k", tmp_path, published)
    assert math_answer(["The answer is 18."], row) == {"pass@1": 1.0}


@pytest.mark.parametrize("name", sorted(LINES))
def test_a_line_without_its_answer_is_refused_by_its_place(tmp_path: Path, name: str) -> None:
    source = GENERATION_TASKS.find(name).source
    assert isinstance(source, DataFile)
    line = {key: text for key, text in LINES[name].items() if key != source.reference}
    with pytest.raises(CorpusError, match=rf"jsonl:1: {source.reference} is missing"):
        row_of(name, tmp_path, line)
