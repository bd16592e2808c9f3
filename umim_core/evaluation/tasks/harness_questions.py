"""Questions of a multiple-choice task that lm-eval ships, by split, for training on them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from datasets.exceptions import DatasetsError
from lm_eval.api.task import Task

from umim_core.errors import ConfigError, CorpusError
from umim_core.evaluation.tasks.task_runs import knows_task, load_tasks, standing_for_the_hub
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
        name: Name of the task in lm-eval; tags and groups are no tasks.
        hub: Folder that stands for the hub in the task's data; None asks the hub.

    Raises:
        ConfigError: If lm-eval has no task of this name, or its questions have no choices.
        CorpusError: If its data cannot be read or lacks a split that the task names, it has no
            training questions, or a question has no text, no choices or no index of the right one.
    """
    if not knows_task(name):
        raise ConfigError(
            "questions of lm-eval are those of one task that it ships",
            name,
            "`lm-eval ls subtasks` lists them; tags and groups name several.",
        )
    if hub is not None and not hub.is_dir():
        raise CorpusError(
            "a folder that stands for the hub must exist",
            str(hub),
            "Correct hub of the questions, or leave it out.",
        )
    digest = "" if hub is None else directory_digest(hub)
    with standing_for_the_hub(None if hub is None else str(hub.resolve()), digest):
        try:
            task = load_tasks([name])[name]
            splits = _splits(task)
        except (OSError, ValueError, RuntimeError, KeyError, DatasetsError) as error:
            raise CorpusError(
                f"the data of lm-eval's task {name} must be at hand, with all its splits",
                f"{type(error).__name__}: {error}",
                "Name a folder that stands for the hub.",
            ) from error
    if task.OUTPUT_TYPE != "multiple_choice":
        raise ConfigError(
            "a task to adapt to must be multiple choice",
            f"{name} of lm-eval is {task.OUTPUT_TYPE}",
            "Name a task of questions with choices.",
        )
    if "train" not in splits:
        raise CorpusError(
            "a task to adapt to must have training questions",
            f"{name} of lm-eval has none",
            "Give files of questions (kind: files).",
        )
    form = QuestionForm("{context}", task.get_config("target_delimiter"), "context")
    return form, {split: _questions(task, docs) for split, docs in splits.items()}


def _splits(task: Task) -> dict[TaskSplit, Any]:
    splits: dict[TaskSplit, Any] = {"test": task.eval_docs}
    if task.has_training_docs():
        splits["train"] = task.training_docs()
    if task.has_test_docs() and task.has_validation_docs():
        splits["valid"] = task.validation_docs()
    return splits


def _questions(task: Task, docs: Iterable[dict[str, Any]]) -> list[Question]:
    questions = []
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
        questions.append(Question(text, tuple(choices), gold, str(doc.get("id", ""))))
    return questions
