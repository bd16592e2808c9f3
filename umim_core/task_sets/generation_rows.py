"""Rows of a generation task: prompts that fit its length, with their references.

room     length - answer - CHAT_ROOM: tokens of the prompt, answer prefix included
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from umim_core.task_sets.generation_spec import GenerationQuestion, GenerationSet, Wish
from umim_core.task_sets.spec import TaskSplit
from umim_core.task_sets.task_options import TaskOptions
from umim_core.text.token_ids import encode

QUESTIONS: Final = 100  # where a call does not say it
CHAT_ROOM: Final = 64  # tokens that a chat template may add to a prompt
Row = dict[str, Any]


def make_rows(
    task: GenerationSet,
    options: TaskOptions,
    tokenizer: PreTrainedTokenizerBase,
    split: TaskSplit = "test",
) -> list[Row]:
    """Return the questions of a task as rows.

    Returns:
        Rows with ``id``, ``prompt``, ``question``, ``answer_prefix``, ``references``,
        ``prompt_tokens`` (of prompt and prefix) and the fields that the prompt does not show.

    Raises:
        EvaluationError: If a prompt does not fit its length.
    """

    def count(text: str) -> int:
        return len(encode(tokenizer, text))

    def size(fields: Mapping[str, str]) -> int:
        prefix = task.answer_prefix.format(**fields)
        return count(task.prompt.format(**fields) + (f" {prefix}" if prefix else ""))

    wish = Wish(
        task=task.name,
        questions=options.task_questions or QUESTIONS,
        room=task.length - new_tokens(task, options) - CHAT_ROOM,
        size=size,
        count=count,
        seed=options.task_seed,
        split=split,
    )
    return [_row(task, question, size(question.fields)) for question in task.make(wish)]


def new_tokens(task: GenerationSet, options: TaskOptions) -> int:
    """Return the most tokens of an answer in a call."""
    return options.task_new_tokens or task.max_new_tokens


def _row(task: GenerationSet, question: GenerationQuestion, prompt_tokens: int) -> Row:
    used = task.used_fields()
    return {
        "id": question.id,
        "prompt": task.prompt.format(**question.fields),
        "question": task.question.format(**question.fields),
        "answer_prefix": task.answer_prefix.format(**question.fields),
        "references": list(question.references),
        "prompt_tokens": prompt_tokens,
        **{name: text for name, text in question.fields.items() if name not in used},
    }
