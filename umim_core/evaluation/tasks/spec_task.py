"""Tasks of ``umim_core.task_sets`` for lm-eval: their configuration and their data."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final

from datasets import Dataset, DatasetDict
from lm_eval.api.task import ConfigurableTask

from umim_core.errors import CorpusError
from umim_core.evaluation.console import one_line_errors
from umim_core.task_sets.choice_questions import read_questions
from umim_core.task_sets.spec import TASKS, TaskSet

COLUMNS: Final = ("context", "choices", "gold")


class SpecTask(ConfigurableTask):  # type: ignore[misc]  # lm-eval ships no types
    """A task that a YAML file names, for lm-eval's own command; all else is in its ``TaskSet``."""

    @one_line_errors()
    def __init__(self, config: dict[str, Any]) -> None:
        filled_in = lm_eval_config(TASKS.find(config["task"]))
        super().__init__(
            config=filled_in | {"metadata": filled_in["metadata"] | config["metadata"]}
        )


def lm_eval_config(task: TaskSet) -> dict[str, Any]:
    """Return a task as lm-eval's configuration."""
    return {
        "task": task.name,
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
            for metric in ("acc", "acc_norm")
        ],
        "metadata": {"version": 1.0},
    }


def load_splits(
    task: TaskSet,
    task_data: str | None = None,
    **metadata: object,
) -> DatasetDict:
    """Load a task's splits for lm-eval.

    Args:
        task: The task.
        task_data: Folder with a file per split; by default one that is written once from the task's
            own source.
        **metadata: Ignored; lm-eval passes the task's metadata and the model's arguments.

    Returns:
        The splits with the columns context, choices and gold.

    Raises:
        CorpusError: If a file is missing or malformed.
    """
    folder = Path(task_data) if task_data else task.built()
    if not folder.is_dir():
        raise CorpusError(
            "task_data must name a folder with a .jsonl file of each split",
            str(folder),
            f"Correct it, or leave it out. The splits are {', '.join(task.splits)}.",
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
