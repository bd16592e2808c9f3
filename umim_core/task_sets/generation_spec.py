"""Specification and registry of generation tasks, and their rows: prompts that fit a length.

A file of this package adds its task by ``add_generation_task(GenerationSet(...))``; lm-eval's task
is made of it (``evaluation.tasks.lm_eval_tasks``). A prompt, its answer prefix included, has
room for length - answer - CHAT_ROOM tokens. Everything is drawn from generators that seed, split,
task and number of the question give: the same of them give the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

from pydantic import Field

from umim_core.config.model_base import Model, Split, validated
from umim_core.errors import EvaluationError, require
from umim_core.registry import Registry
from umim_core.task_sets.spec import template_fields
from umim_core.text.token_ids import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Wish:
    """Questions that a task's ``make`` is asked for, one number after the other.

    ``size`` counts the tokens of the prompt of some fields, ``count`` those of a text.
    """

    task: str
    room: int
    size: Callable[[Mapping[str, str]], int]
    count: Callable[[str], int]
    seed: int
    split: Split

    def generator(self, number: int) -> Random:
        """Return the random generator of one question; its length has no part in it."""
        return Random(f"{self.seed}/{self.split}/{self.task}/{number}")

    def filled(
        self, units: Iterator[str], fields: Callable[[Sequence[str]], Mapping[str, str]]
    ) -> Mapping[str, str]:
        """Fill a prompt with as many units as it has room for, and return its fields.

        The next unit, or one more for what tokens merge at borders, would not fit.
        """
        taken: list[str] = []
        room = self.room - self.size(fields(taken))
        for unit in units:
            room -= self.count(f" {unit}")
            if room < 0:
                break
            taken.append(unit)
        while self.size(fields(taken)) > self.room:
            require(
                bool(taken),
                EvaluationError,
                "a generated prompt must fit into its length",
                f"room for {self.room} tokens",
                "Ask for shorter answers (task_new_tokens), or a longer task.",
            )
            taken.pop()
        return fields(taken)


MakeQuestion = Callable[[Wish, int], tuple[Mapping[str, str], Sequence[str]]]


@dataclass(frozen=True)
class GenerationSet:
    """A generation task whose questions the package makes: fields of one, and its references."""

    name: str
    prompt: str
    make: MakeQuestion
    version: int
    metrics: tuple[str, ...]
    max_new_tokens: int
    length: int
    answer_prefix: str = ""
    question: str = ""
    until: tuple[str, ...] = ()

    def used_fields(self) -> set[str]:
        """Return the fields of prompt, question and answer prefix."""
        templates = (self.prompt, self.question, self.answer_prefix)
        return {name for template in templates for name in template_fields(template)}

    def key(self) -> dict[str, object]:
        """Return the facts that decide the questions' content, for logs and keys."""
        return {"task": self.name, "licence": "Apache-2.0", "generator": self.version}


GENERATION_TASKS: Final = Registry[GenerationSet]("umim_core.task_sets", "generation task")
"""All generation tasks by name; an unknown one lists them."""


def add_generation_task(task: GenerationSet) -> None:
    GENERATION_TASKS.add(task.name, task)


QUESTIONS: Final = 100  # where a call does not say it
CHAT_ROOM: Final = 64  # tokens that a chat template may add to a prompt
GenerationRow = dict[str, Any]


class TaskOptions(Model):
    """Options of one call, of generated tasks and (the last two) of others."""

    task_seed: Annotated[int, Field(ge=0, strict=True)] = 0
    task_questions: Annotated[int, Field(ge=1, strict=True)] | None = None  # 100
    task_new_tokens: Annotated[int, Field(ge=1, strict=True)] | None = None  # the task's own
    task_data: str | None = None
    task_features: str | None = None  # model whose states BERTScore compares

    @classmethod
    def read(cls, metadata: Mapping[str, object]) -> Self:
        """Take the options out of a task's metadata, where model arguments stand too."""
        options = {name: value for name, value in metadata.items() if name.startswith("task_")}
        return validated(cls, options)


def make_rows(
    task: GenerationSet,
    options: TaskOptions,
    tokenizer: PreTrainedTokenizerBase,
    split: Split = "test",
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
        room=task.length - new_tokens(task, options) - CHAT_ROOM,
        size=size,
        count=count,
        seed=options.task_seed,
        split=split,
    )
    used, rows = task.used_fields(), []
    for number in range(options.task_questions or QUESTIONS):
        question, references = task.make(wish, number)
        row = {
            "id": str(number),
            "prompt": task.prompt.format(**question),
            "question": task.question.format(**question),
            "answer_prefix": task.answer_prefix.format(**question),
            "references": list(references),
            "prompt_tokens": size(question),
        }
        rows.append(row | {name: text for name, text in question.items() if name not in used})
    return rows


def new_tokens(task: GenerationSet, options: TaskOptions) -> int:
    """Return the most tokens of an answer in a call."""
    return options.task_new_tokens or task.max_new_tokens
