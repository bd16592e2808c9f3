"""Tasks of ``umim_core.task_sets`` for lm-eval: their configuration and their data."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final

from datasets import Dataset, DatasetDict
from lm_eval.api.task import ConfigurableTask

from umim_core.errors import CorpusError
from umim_core.evaluation.console import one_line_errors
from umim_core.evaluation.tasks.sequence_task import SEQUENCE_METRIC, SequenceTask
from umim_core.task_sets.choice_questions import read_questions
from umim_core.task_sets.spec import TASKS, TaskSet
from umim_core.task_sets.task_files import DATA_VARIABLE, find_data_file, task_folder

COLUMNS: Final = ("context", "choices", "gold")


class SpecTask(ConfigurableTask):  # type: ignore[misc]  # lm-eval ships no types
    """A task that a YAML file names, for lm-eval's own command; all else is in its ``TaskSet``.

    Args:
        config: The YAML file: ``task`` is the name; ``metadata`` goes to :func:`load_splits`.
    """

    @one_line_errors()
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config=_filled(config))


class SpecSequenceTask(SequenceTask):
    """The same for a task with the paper's accuracy."""

    @one_line_errors()
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config=_filled(config))


def _filled(config: dict[str, Any]) -> dict[str, Any]:
    """Return the whole configuration of the task that a YAML file names."""
    made = lm_eval_config(TASKS.find(config["task"]))
    return made | {"metadata": made["metadata"] | config["metadata"]}


def lm_eval_config(task: TaskSet) -> dict[str, Any]:
    """Return a task as lm-eval's configuration."""
    own = [SEQUENCE_METRIC] if SEQUENCE_METRIC in task.metrics else []
    return {
        "task": task.name,
        **({"class": SequenceTask} if own else {}),
        "custom_dataset": partial(load_splits, task),
        "training_split": "train" if "train" in task.splits else None,
        "validation_split": "valid" if "valid" in task.splits else None,
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": task.form.prompt.replace("{context}", "{{context}}"),
        "doc_to_target": "gold",
        "doc_to_choice": "choices",
        "target_delimiter": task.form.delimiter,
        "should_decontaminate": False,
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True}
            for metric in (*own, "acc", "acc_norm")
        ],
        "metadata": {"version": 1.0},
    }


def load_splits(
    task: TaskSet,
    task_data: str | None = None,
    split_folder: str | None = None,
    **metadata: object,
) -> DatasetDict:
    """Load a task's splits for lm-eval.

    Args:
        task: The task.
        task_data: Folder with the task's data file, or, for a task without one, with a file per
            split; by default what ``UMIM_TASK_DATA`` names, else one that is written once from the
            task's own source.
        split_folder: Folder with a file per split, of any task.
        **metadata: Ignored; lm-eval passes the task's metadata and the model's arguments.

    Returns:
        The splits with the columns context, choices and gold.

    Raises:
        CorpusError: If a file is missing or malformed.
    """
    given = None if split_folder else task_folder(task_data)
    if given and task.data:
        files = {"test": find_data_file(task.data, given)}
    else:
        folder = Path(split_folder) if split_folder else given or task.built()
        if not folder.is_dir():
            raise CorpusError(
                f"{DATA_VARIABLE} must name a folder with a .jsonl file of each split",
                str(folder),
                f"Correct or unset it. The splits are {', '.join(task.splits)}.",
            )
        files = {split: folder / f"{split}.jsonl" for split in task.splits}
    return DatasetDict(
        {
            split: Dataset.from_list(
                [{name: getattr(question, name) for name in COLUMNS} for question in questions]
            )
            for split, questions in ((split, read_questions(file)) for split, file in files.items())
        }
    )
