"""Specification and registry of generation tasks: a prompt, generated text, metrics of it.

A file of this package adds its task by ``add_generation_task(GenerationSet(...))``; lm-eval's task
is made of it (``umim_core.evaluation.tasks.generation_task``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Final

from umim_core.errors import ConfigError
from umim_core.registry import Registry
from umim_core.task_sets.spec import TaskSplit


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
    """A generation task whose questions the package makes.

    Raises:
        ConfigError: If the name, a template or a number is out of bounds.
    """

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
        """Return the fields of prompt, question and answer prefix.

        Raises:
            ConfigError: If a template is malformed or asks for more than a field's text.
        """
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
    """Add a task under its name.

    Raises:
        ConfigError: If the name is taken.
    """
    return GENERATION_TASKS.add(task.name)(task)
