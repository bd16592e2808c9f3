"""Rows of a generation task: prompts that fit its length, with their references.

room     length - answer - CHAT_ROOM: tokens of the prompt, answer prefix included
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Self

from transformers import PreTrainedTokenizerBase

from umim_core.errors import ConfigError, did_you_mean
from umim_core.task_sets.generation_spec import GenerationQuestion, GenerationSet, Wish
from umim_core.task_sets.spec import TaskSplit
from umim_core.text.token_ids import encode

QUESTIONS: Final = 100  # where a call does not say it
CHAT_ROOM: Final = 64  # tokens that a chat template may add to a prompt
Row = dict[str, Any]


_PREFIX: Final = "task_"
_LEAST: Final = {"task_seed": 0, "task_questions": 1, "task_new_tokens": 1}
_OTHERS: Final = {"task_data", "task_features"}  # of tasks that are not generated


@dataclass(frozen=True)
class TaskOptions:
    """Options of one call, for all of its tasks.

    Attributes:
        task_seed: Seed of generated questions.
        task_questions: Most questions per task; 100 if None.
        task_new_tokens: Most tokens of an answer, instead of the task's own number.

    Raises:
        ConfigError: If a number is out of bounds.
    """

    task_seed: int = 0
    task_questions: int | None = None
    task_new_tokens: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), _LEAST[field.name]
            if value is None and field.default is None:
                continue
            if type(value) is not int or value < least:
                raise ConfigError(
                    f"{field.name} must be a whole number of at least {least}", value, "Correct it."
                )

    @classmethod
    def read(cls, metadata: Mapping[str, object]) -> Self:
        """Take the options out of a task's metadata, where model arguments stand too.

        Raises:
            ConfigError: If a name that begins with ``task_`` is unknown, or a value out of bounds.
        """
        known = {field.name for field in fields(cls)}
        options = {name: value for name, value in metadata.items() if name.startswith(_PREFIX)}
        options = {name: value for name, value in options.items() if name not in _OTHERS}
        for name in options.keys() - known:
            raise ConfigError(
                f"an option of tasks must be one of {', '.join(sorted(known))}",
                name,
                did_you_mean(name, known) or "Leave it out.",
            )
        return cls(**options)  # type: ignore[arg-type]  # __post_init__ checks the values


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
