"""Multiple-choice questions and their files; specification and registry of multiple-choice tasks.

A file of this package adds its task by ``add_task(TaskSet(...))``, and that is all: recipes name
it, the stages write, train on and score it, and lm-eval's configuration is made of it. A file of
questions has a JSON object per line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any, Final, Literal

from umim_core.config.evaluate import MergedPart
from umim_core.config.model_base import SPLITS, Split
from umim_core.errors import ConfigError, CorpusError, require
from umim_core.registry import Registry
from umim_core.store.artifacts import json_digest
from umim_core.store.publication import build_once
from umim_core.store.user_cache import user_cache
from umim_core.text.documents import read_objects
from umim_core.text.token_ids import check_encodable


@dataclass(frozen=True)
class Question:
    """One multiple-choice question."""

    context: str
    choices: tuple[str, ...]
    gold: int
    id: str = ""

    def __post_init__(self) -> None:
        for text in (self.context, *self.choices, self.id):
            check_encodable(text)
        context, choices = self.context.strip(), [choice.strip() for choice in self.choices]
        rule = "a question's context must hold text"
        require(bool(context), CorpusError, rule, self.context, "Fill it in.")
        rule = "a question needs at least two choices with text"
        enough = len(choices) >= 2 and all(choices)
        require(enough, CorpusError, rule, self.choices, "Add the missing.")
        rule = f"gold must be an index into {len(choices)} choices, counted from 0"
        require(0 <= self.gold < len(choices), CorpusError, rule, self.gold, "Correct the index.")


def read_questions(path: str | Path) -> list[Question]:
    """Read questions: rows ``{"context": str, "choices": [str], "gold": int}``, and an ``id``."""
    questions = [_question(row, place) for place, row in read_objects(path)]
    rule = f"the question file {path} must hold questions"
    require(bool(questions), CorpusError, rule, "none", "Fill it.")
    return questions


def _question(row: Mapping[str, Any], where: str) -> Question:
    context, choices, gold = row.get("context"), row.get("choices"), row.get("gold")
    name = row.get("id")
    if (
        not isinstance(context, str)
        or not isinstance(choices, list)
        or not all(isinstance(choice, str) for choice in choices)
        or not isinstance(gold, int)
        or isinstance(gold, bool)
    ):
        raise CorpusError(
            f"{where} must hold context (string), choices (list of strings) and gold (integer)",
            row,
            "Correct the line.",
        )
    try:
        return Question(context, tuple(choices), gold, name if isinstance(name, str) else "")
    except CorpusError as error:
        raise CorpusError(f"{where}: {error.rule}", error.value, error.remedy) from error


WriteQuestions = Callable[[Path, Mapping[Split, int] | None, Path | None], None]


@dataclass(frozen=True)
class QuestionForm:
    """Text that is made of a question, and the part of it that rules merge."""

    prompt: str = "{context}"
    delimiter: str = " "
    part: MergedPart = "sequence"

    def __post_init__(self) -> None:
        require(
            template_fields(self.prompt) == ["context"],
            ConfigError,
            "the prompt must hold the field {context} once and no other",
            self.prompt,
            "Write a brace that is text twice: {{ or }}.",
        )

    @property
    def cue(self) -> str:
        """The text of the prompt behind the question."""
        return cue_of(self.prompt)


def template_fields(template: str) -> list[str]:
    """Return the fields of a format string; ``{x!r}`` and a brace alone are none: !."""
    try:
        parts = [part[1:] for part in Formatter().parse(template) if part[1] is not None]
    except ValueError:
        return ["!"]
    return ["!" if form or change else str(name) for name, form, change in parts]


def cue_of(template: str) -> str:
    """Return the text of a format string behind its last field; empty if nothing is there."""
    *_, (text, field, _, _) = Formatter().parse(template)
    return text if field is None else ""


@dataclass(frozen=True)
class TaskSet:
    """A multiple-choice task, by the name that recipes and lm-eval have.

    ``write`` makes ``<split>.jsonl`` with rows ``{"context", "choices", "gold"}`` in a folder, at
    most so many per split (None: all), from a corpus folder or (None) from its own source.
    """

    name: str
    write: WriteQuestions
    chance: float  # accuracy of guessing, 0..1
    form: QuestionForm
    metrics: tuple[str, ...] = ("acc_tok",)  # the headline first
    splits: tuple[Split, ...] = SPLITS  # ``test`` is scored, the others adapt
    corpus: str | None = None  # kind of the one whose documents are asked of; None: its own
    sources: Callable[[], list[list[str]]] = list  # [name, version] of what ``write`` reads itself

    @property
    def merge(self) -> Literal["prompt", "all"]:
        """Mode of lm-eval's model: it merges the prompt or the whole, as the task does."""
        return "prompt" if self.form.part == "context" else "all"

    def key(self) -> dict[str, object]:
        """Return what of the task is part of a stage's key."""
        return {"task": self.name, "form": vars(self.form)}

    def built(self) -> Path:
        """Return the folder of the questions from the task's own source, written if need be.

        It lies under ``$XDG_CACHE_HOME/umim`` (``~/.cache/umim``), one folder per content of
        ``sources``; a second process waits for the first.
        """
        digest = json_digest(self.sources())
        place = user_cache() / f"{self.name}-{digest[:16]}"
        build_once(
            place,
            digest,
            lambda folder: self.write(folder, None, None),
            kind="questions",
            schema=1,
            rebuild="damaged",
        )
        return place


TASKS: Final = Registry[TaskSet]("umim_core.task_sets", "task")
"""All tasks by name; an unknown one lists them."""


def add_task(task: TaskSet) -> None:
    TASKS.add(task.name, task)
