"""Generation tasks of ``umim_core.task_sets`` for lm-eval: configuration, metrics, cells not run.

    lm_eval --model umim --tasks umim_ruler_4k --include_path "$(umim path --tasks)"

A task that is longer than the backbone was trained for asks the model nothing, and each of its
figures is the text ``not run: context``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from datasets import Dataset, DatasetDict
from lm_eval.api.task import ConfigurableTask

from umim_core.evaluation.console import one_line_errors
from umim_core.evaluation.tasks.paper_task import figures_config, judged
from umim_core.evaluation.tasks.task_backbone import task_context, task_tokenizer
from umim_core.evaluation.text_metrics.text_metric import TEXT_METRICS
from umim_core.task_sets.generation_rows import Row, TaskOptions, make_rows, new_tokens
from umim_core.task_sets.generation_spec import GENERATION_TASKS, GenerationSet

NOT_RUN: Final = "not run: context"
_VERSION: Final = 1.0


class GenerationTask(ConfigurableTask):  # type: ignore[misc]  # lm-eval ships no types
    """A generation task; all but its name is in its ``GenerationSet``."""

    @one_line_errors()
    def __init__(self, config: dict[str, Any]) -> None:
        task = GENERATION_TASKS.find(config["task"])
        super().__init__(config=generation_config(task, config.get("metadata") or {}))


def generation_config(task: GenerationSet, metadata: Mapping[str, Any]) -> dict[str, object]:
    """Return a task with its questions as lm-eval's configuration.

    Raises:
        ConfigError: If an option or a metric is unknown.
        BackboneError: If the model's tokenizer cannot be loaded.
    """
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
        "custom_dataset": _dataset(rows),
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
            (lambda row, answers: judged(metrics, row, answers[0])) if runs else _not_run(figures)
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


def _dataset(rows: list[Row]) -> Any:
    """Return the data function of rows; lm-eval passes it the metadata."""

    def load(**_: object) -> DatasetDict:
        return DatasetDict({"test": Dataset.from_list(rows)})

    return load


def _not_run(figures: Sequence[str]) -> Any:
    """Return the function that gives every figure of a task that is not run."""

    def process_results(row: Row, answers: list[list[str]]) -> dict[str, str]:
        return dict.fromkeys(figures, NOT_RUN)

    return process_results


def _same(values: Sequence[str]) -> str:
    """Return the text that stands for every figure of a task that is not run."""
    return values[0]
