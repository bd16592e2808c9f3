"""Specification and registry of generation tasks, and their rows: prompts that fit a length.

A file of this package adds its task by ``add_generation_task(GenerationSet(...))``; lm-eval's task
is made of it (``evaluation.tasks.lm_eval_tasks``). A prompt, its answer prefix included, has
room for length - answer - CHAT_ROOM tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from string import Formatter
from typing import TYPE_CHECKING, Any, Final, Self

from umim_core.errors import ConfigError, did_you_mean
from umim_core.registry import Registry
from umim_core.task_sets.spec import TaskSplit
from umim_core.text.token_ids import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class GenerationQuestion:
    """One question."""

    id: str
    fields: Mapping[str, str]
    references: tuple[str, ...]


@dataclass(frozen=True)
class Wish:
    """Questions that a generator is asked for."""

    task: str
    questions: int
    room: int
    size: Callable[[Mapping[str, str]], int]
    count: Callable[[str], int]
    seed: int
    split: TaskSplit


@dataclass(frozen=True)
class GenerationSet:
    """A generation task whose questions the package makes."""

    name: str
    prompt: str
    make: Callable[[Wish], Iterable[GenerationQuestion]]
    version: int
    metrics: tuple[str, ...]
    max_new_tokens: int
    length: int
    licence: str = "Apache-2.0"
    answer_prefix: str = ""
    question: str = ""
    until: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.name.startswith("umim_"):
            raise ConfigError(
                "a generation task's name must begin with umim_, so that no stock task has it",
                self.name,
                "Rename it.",
            )
        if not 1 <= self.max_new_tokens < self.length:
            raise ConfigError(
                "max_new_tokens must be at least 1 and below the length",
                (self.max_new_tokens, self.length),
                "Correct them.",
            )
        if not (self.metrics and self.licence):
            raise ConfigError(
                "a generation task must name metrics and a licence", self.name, "Name them."
            )
        self.used_fields()

    def used_fields(self) -> set[str]:
        """Return the fields of prompt, question and answer prefix."""
        names = set()
        for template in (self.prompt, self.question, self.answer_prefix):
            try:
                parts = [
                    (name, form, conversion)
                    for _, name, form, conversion in Formatter().parse(template)
                    if name is not None
                ]
            except ValueError:  # a brace alone
                parts = [("", None, None)]
            for name, form, conversion in parts:
                if not name.isidentifier() or form or conversion:
                    raise ConfigError(
                        "a template must hold plain fields such as {question}",
                        template,
                        "Write a brace that is text twice: {{ or }}.",
                    )
                names.add(name)
        return names

    def key(self) -> dict[str, object]:
        """Return the facts that decide the questions' content, for logs and keys."""
        return {"task": self.name, "licence": self.licence, "generator": self.version}


GENERATION_TASKS: Final = Registry[GenerationSet]("umim_core.task_sets", "generation task")
"""All generation tasks by name; an unknown one lists them."""


def add_generation_task(task: GenerationSet) -> GenerationSet:
    """Add a task under its name."""
    return GENERATION_TASKS.add(task.name)(task)


QUESTIONS: Final = 100  # where a call does not say it
CHAT_ROOM: Final = 64  # tokens that a chat template may add to a prompt
GenerationRow = dict[str, Any]


_PREFIX: Final = "task_"
_LEAST: Final = {"task_seed": 0, "task_questions": 1, "task_new_tokens": 1}
_OTHERS: Final = {"task_data", "task_features"}  # of tasks that are not generated


@dataclass(frozen=True)
class TaskOptions:
    """Options of one call: seed, most questions (100 if None), most tokens of an answer."""

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
        """Take the options out of a task's metadata, where model arguments stand too."""
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
) -> list[GenerationRow]:
    """Return the questions of a task as rows.

    They have ``id``, ``prompt``, ``question``, ``answer_prefix``, ``references``, ``prompt_tokens``
    (of prompt and prefix) and the fields that the prompt does not show.
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


def _row(task: GenerationSet, question: GenerationQuestion, prompt_tokens: int) -> GenerationRow:
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
