"""Rows of a generation task: prompts that fit the backbone, with their references.

limit    tokens of prompt and answer: the task's length, or the context where a field is cut
room     limit - answer - CHAT_ROOM: tokens of the prompt, answer prefix included
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, Final

from umim_core.errors import EvaluationError
from umim_core.task_sets.generation_spec import (
    GenerationQuestion,
    GenerationSet,
    Wish,
)
from umim_core.task_sets.spec import TaskSplit
from umim_core.task_sets.task_files import DataFile, read_rows, task_folder
from umim_core.task_sets.task_options import TaskOptions
from umim_core.task_sets.text_tokens import TextTokens

QUESTIONS: Final = 100  # of a generated task, where a call does not say it
CHAT_ROOM: Final = 64  # tokens that a chat template may add to a prompt of a stated length
Row = dict[str, Any]


def make_rows(
    task: GenerationSet,
    options: TaskOptions,
    tokens: TextTokens,
    context: int | None,
    split: TaskSplit = "test",
) -> list[Row]:
    """Return the questions of a task as rows.

    Args:
        task: The task.
        options: Options of the call.
        tokens: Tokens of the backbone.
        context: Tokens that the backbone was trained for; None if unknown.
        split: ``train`` for texts to mine and train on, of generated tasks alone.

    Returns:
        Rows with ``id``, ``prompt``, ``question``, ``answer_prefix``, ``references``,
        ``prompt_tokens`` (of prompt and prefix), ``cut_tokens`` (cut out of the prompt) and the
        fields that the prompt does not show.

    Raises:
        CorpusError: If data are missing or malformed.
        EvaluationError: If a question does not fit although it may be cut, or the length of
            generated texts is unknown.
    """
    limit = _limit(task, options, context)
    if isinstance(task.source, DataFile):
        questions = _read(task.source, options)
    else:
        questions = task.source.make(_wish(task, options, tokens, limit, split))
    return [_row(task, question, options, tokens, limit) for question in questions]


def new_tokens(task: GenerationSet, options: TaskOptions) -> int:
    """Return the most tokens of an answer in a call."""
    return options.task_new_tokens or task.max_new_tokens


def exceeds(
    task: GenerationSet, options: TaskOptions, context: int | None, rows: Iterable[Row] = ()
) -> bool:
    """Return whether prompt and answer of a task are longer than the backbone was trained for.

    Args:
        task: The task.
        options: Options of the call.
        context: Tokens that the backbone was trained for; None if unknown: nothing exceeds it.
        rows: Rows that have been made; a task of a stated length exceeds by it alone.
    """
    if context is None:
        return False
    longest = max((row["prompt_tokens"] for row in rows), default=0)
    return max(task.length or 0, longest + new_tokens(task, options)) > context


def _read(file: DataFile, options: TaskOptions) -> Iterable[GenerationQuestion]:
    rows = read_rows(file, task_folder(options.task_data), options.task_revision)
    for row in islice(rows, options.task_questions):
        fields = {name: row[name] for name in file.fields}
        yield GenerationQuestion(row["id"], fields, tuple(row["references"]))


def _limit(task: GenerationSet, options: TaskOptions, context: int | None) -> int | None:
    if task.length is not None:
        return task.length
    known = [number for number in (context, options.task_length) if number is not None]
    return min(known) if task.cut is not None and known else None


def _room(task: GenerationSet, options: TaskOptions, limit: int) -> int:
    return limit - new_tokens(task, options) - CHAT_ROOM


def _size(task: GenerationSet, fields: Mapping[str, str], tokens: TextTokens) -> int:
    """Return the tokens of the prompt that fields make, answer prefix included."""
    prefix = task.answer_prefix.format(**fields)
    return tokens.count(task.prompt.format(**fields) + (f" {prefix}" if prefix else ""))


def _wish(
    task: GenerationSet,
    options: TaskOptions,
    tokens: TextTokens,
    limit: int | None,
    split: TaskSplit,
) -> Wish:
    if limit is None:
        raise EvaluationError(
            f"the length of {task.name} must be known before its texts are generated",
            "the backbone's configuration names no context",
            "Give one: --metadata task_length=4096.",
        )
    return Wish(
        task=task.name,
        questions=options.task_questions or QUESTIONS,
        room=_room(task, options, limit),
        size=lambda fields: _size(task, fields, tokens),
        tokens=tokens,
        seed=options.task_seed,
        split=split,
        filler=options.filler(),
    )


def _row(
    task: GenerationSet,
    question: GenerationQuestion,
    options: TaskOptions,
    tokens: TextTokens,
    limit: int | None,
) -> Row:
    whole = size = _size(task, question.fields, tokens)
    if limit is not None and task.cut is not None:
        question, size = _fitted(task, question, tokens, _room(task, options, limit))
    used = task.used_fields()
    return {
        "id": question.id,
        "prompt": task.prompt.format(**question.fields),
        "question": task.question.format(**question.fields),
        "answer_prefix": task.answer_prefix.format(**question.fields),
        "references": list(question.references),
        "prompt_tokens": size,
        "cut_tokens": whole - size,
        **{name: text for name, text in question.fields.items() if name not in used},
    }


def _fitted(
    task: GenerationSet, question: GenerationQuestion, tokens: TextTokens, room: int
) -> tuple[GenerationQuestion, int]:
    """Cut the middle out of a question's long field until its prompt fits."""
    assert task.cut is not None  # noqa: S101  the caller's condition
    text, size = question.fields[task.cut], _size(task, question.fields, tokens)
    keep, fitted = tokens.count(text), question
    while size > room:
        keep -= size - room
        if keep < 0:
            raise EvaluationError(
                f"a prompt of {task.name} must fit without its {task.cut}",
                f"question {question.id}, room for {room} tokens",
                "Use a backbone with a longer context, or a larger task_length.",
            )
        fields = {**question.fields, task.cut: tokens.keep_ends(text, keep)}
        fitted, size = replace(question, fields=fields), _size(task, fields, tokens)
    return fitted, size
