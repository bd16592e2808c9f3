"""Rows of a generation task: prompts that fit its length, with their references.

room     length - answer - CHAT_ROOM: tokens of the prompt, answer prefix included
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from umim_core.task_sets.generation_spec import GenerationQuestion, GenerationSet, Wish
from umim_core.task_sets.spec import TaskSplit
from umim_core.task_sets.task_options import TaskOptions
from umim_core.task_sets.text_tokens import TextTokens

QUESTIONS: Final = 100  # where a call does not say it
CHAT_ROOM: Final = 64  # tokens that a chat template may add to a prompt
Row = dict[str, Any]


def make_rows(
    task: GenerationSet, options: TaskOptions, tokens: TextTokens, split: TaskSplit = "test"
) -> list[Row]:
    """Return the questions of a task as rows.

    Args:
        task: The task.
        options: Options of the call.
        tokens: Tokens of the backbone.
        split: ``train`` for texts to mine and train on.

    Returns:
        Rows with ``id``, ``prompt``, ``question``, ``answer_prefix``, ``references``,
        ``prompt_tokens`` (of prompt and prefix) and the fields that the prompt does not show.

    Raises:
        CorpusError: If the filler is missing or holds no sentence.
        EvaluationError: If a prompt does not fit its length.
    """
    wish = Wish(
        task=task.name,
        questions=options.task_questions or QUESTIONS,
        room=task.length - new_tokens(task, options) - CHAT_ROOM,
        size=lambda fields: _size(task, fields, tokens),
        tokens=tokens,
        seed=options.task_seed,
        split=split,
        filler=options.filler(),
    )
    return [_row(task, question, tokens) for question in task.make(wish)]


def new_tokens(task: GenerationSet, options: TaskOptions) -> int:
    """Return the most tokens of an answer in a call."""
    return options.task_new_tokens or task.max_new_tokens


def _size(task: GenerationSet, fields: Mapping[str, str], tokens: TextTokens) -> int:
    """Return the tokens of the prompt that fields make, answer prefix included."""
    prefix = task.answer_prefix.format(**fields)
    return tokens.count(task.prompt.format(**fields) + (f" {prefix}" if prefix else ""))


def _row(task: GenerationSet, question: GenerationQuestion, tokens: TextTokens) -> Row:
    used = task.used_fields()
    return {
        "id": question.id,
        "prompt": task.prompt.format(**question.fields),
        "question": task.question.format(**question.fields),
        "answer_prefix": task.answer_prefix.format(**question.fields),
        "references": list(question.references),
        "prompt_tokens": _size(task, question.fields, tokens),
        **{name: text for name, text in question.fields.items() if name not in used},
    }
