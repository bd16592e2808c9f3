"""Tasks of ``umim_core.task_sets`` for lm-eval: their configuration, data and metrics.

    lm_eval --model umim --tasks umim_ruler_4k --include_path "$(umim path --tasks)"

A generation task that is longer than the backbone was trained for asks the model nothing, and each
of its figures is the text ``not run: context``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from datasets import Dataset, DatasetDict
from lm_eval.api.task import ConfigurableTask

from umim_core.errors import CorpusError
from umim_core.evaluation.console import one_line_errors
from umim_core.evaluation.model_args import task_context, task_tokenizer
from umim_core.evaluation.tasks.paper_task import figures_config, judged
from umim_core.evaluation.text_metrics.text_metric import TEXT_METRICS
from umim_core.task_sets.generation_spec import (
    GENERATION_TASKS,
    GenerationSet,
    Row,
    TaskOptions,
    make_rows,
    new_tokens,
)
from umim_core.task_sets.spec import TASKS, TaskSet, read_questions

COLUMNS: Final = ("context", "choices", "gold")
NOT_RUN: Final = "not run: context"
_VERSION: Final = 1.0


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
    """Load a task's splits, with the columns context, choices and gold, for lm-eval.

    ``task_data`` is a folder with a file per split; by default one that is written once from the
    task's own source. lm-eval passes the task's metadata and the model's arguments, too.
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


class GenerationTask(ConfigurableTask):  # type: ignore[misc]  # lm-eval ships no types
    """A generation task; all but its name is in its ``GenerationSet``."""

    @one_line_errors()
    def __init__(self, config: dict[str, Any]) -> None:
        task = GENERATION_TASKS.find(config["task"])
        super().__init__(config=generation_config(task, config.get("metadata") or {}))


def generation_config(task: GenerationSet, metadata: Mapping[str, Any]) -> dict[str, object]:
    """Return a task with its questions as lm-eval's configuration."""
    options, context = TaskOptions.read(metadata), task_context(metadata)
    metrics = [TEXT_METRICS.find(name) for name in task.metrics]
    runs = context is None or task.length <= context
    rows = make_rows(task, options, task_tokenizer(metadata)) if runs else [_NOTHING]
    figures = [figure for metric in metrics for figure in metric.figures]
    lengths = [row["prompt_tokens"] for row in rows]
    common = figures_config(metrics)
    unrun = [metric | {"aggregation": _same} for metric in common["metric_list"]]
    return common | {
        "task": task.name,
        "custom_dataset": lambda **_: DatasetDict({"test": Dataset.from_list(rows)}),
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "prompt",
        "doc_to_target": "references",
        "gen_prefix": "answer_prefix" if task.answer_prefix else None,
        "generation_kwargs": {
            "until": list(task.until),
            "max_gen_toks": new_tokens(task, options),
            "do_sample": False,
        },
        "repeats": 1 if runs else 0,  # no request reaches the model
        "process_results": (
            (lambda row, answers: judged(metrics, row, answers[0]))
            if runs
            else (lambda row, answers: dict.fromkeys(figures, NOT_RUN))
        ),
        **({} if runs else {"metric_list": unrun}),
        "metadata": {
            **metadata,
            "version": _VERSION,
            **task.key(),
            "context": context,
            "prompt_tokens": [min(lengths), max(lengths)] if runs else None,
            "not_run": None if runs else NOT_RUN,
        },
    }


_NOTHING: Final[Row] = {
    "id": "none",
    "prompt": NOT_RUN,
    "question": "",
    "answer_prefix": "",
    "references": [NOT_RUN],
    "prompt_tokens": 0,
}


def _same(values: Sequence[str]) -> str:
    """Return the text that stands for every figure of a task that is not run."""
    return values[0]
