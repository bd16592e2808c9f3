"""Questions of a multiple-choice task that lm-eval ships, by split, for training on them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lm_eval.api.task import Task

from umim_core.errors import ConfigError, CorpusError
from umim_core.evaluation.tasks.spec_task import knows_task
from umim_core.evaluation.tasks.task_runs import load_tasks, standing_for_the_hub
from umim_core.store.artifacts import directory_digest
from umim_core.task_sets.choice_questions import Question
from umim_core.task_sets.spec import QuestionForm, TaskSplit


def harness_questions(
    name: str, hub: Path | None = None
) -> tuple[QuestionForm, dict[TaskSplit, list[Question]]]:
    """Return how lm-eval asks a task's questions, and the questions of every split that it has.

    The context is the whole prompt. Where the data set has no test split, lm-eval scores the
    validation split: it is the test split here, and there is no ``valid``.

    Args:
        name: Name of the task in lm-eval.
        hub: Folder that stands for the hub in the task's data; None asks the hub.

    Raises:
        ConfigError: If lm-eval has no task of this name.
        CorpusError: If its data cannot be read, it has no training questions, or a question has no
            text, no choices or no index of the right one.
    """
    if not knows_task(name):
        raise ConfigError(
            "questions of lm-eval are those of a task that it ships",
            name,
            "`lm-eval ls tasks` lists them.",
        )
    digest = "" if hub is None else directory_digest(hub)
    with standing_for_the_hub(None if hub is None else str(hub.resolve()), digest):
        try:
            task = load_tasks([name])[name]
        except (OSError, ValueError, RuntimeError) as error:
            raise CorpusError(
                f"the data of lm-eval's task {name} must be at hand",
                f"{type(error).__name__}: {error}",
                "Name a folder that stands for the hub.",
            ) from error
    if not task.has_training_docs():
        raise CorpusError(
            "a task to adapt to must have training questions",
            f"{name} of lm-eval has none",
            "Give files of questions (kind: files).",
        )
    splits: dict[TaskSplit, Any] = {"train": task.training_docs(), "test": task.eval_docs}
    if task.has_test_docs() and task.has_validation_docs():
        splits["valid"] = task.validation_docs()
    form = QuestionForm("{context}", task.get_config("target_delimiter"), "context")
    return form, {split: _questions(task, docs) for split, docs in splits.items()}


def _questions(task: Task, docs: Iterable[dict[str, Any]]) -> list[Question]:
    found = []
    for number, doc in enumerate(docs):
        text, choices = task.doc_to_text(doc), task.doc_to_choice(doc)
        gold = task.doc_to_target(doc)
        if isinstance(gold, str) and gold in choices:
            gold = choices.index(gold)
        if not isinstance(text, str) or not isinstance(gold, int):
            raise CorpusError(
                f"question {number} of lm-eval's {task.task_name} must have a text and one answer",
                {"text": text, "answer": gold},
                "Name a task of questions with choices.",
            )
        found.append(Question(text, tuple(choices), gold, str(doc.get("id", ""))))
    return found
