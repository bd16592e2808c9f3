"""LAMBADA: predict the last word of a passage from all that comes before it.

    passage   "... he asked Sarah . She nodded , and gave the key to Sarah"
    context   all but the last word
    target    " Sarah": accuracy of greedy decoding, perplexity of the word

Passages come from a file ``lambada.jsonl`` or ``lambada_*.jsonl`` in the folder that
``UMIM_TASK_DATA`` names, one ``{"text": "..."}`` a line; without a folder they come from the data
set of the hub that lm-eval's ``lambada_openai`` reads. Cut and metrics are that task's.

Source: Paperno et al., 2016, "The LAMBADA dataset"; lm_eval 0.4.13, ``lm_eval/tasks/lambada``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from datasets import Dataset, DatasetDict
from lm_eval.api.task import ConfigurableTask

from umim_core.errors import CorpusError
from umim_core.evaluation.console import one_line_errors
from umim_core.task_sets.task_files import find_data_file, read_objects, task_folder
from umim_core.text.hub_dataset import open_hub_dataset

LAMBADA: Final = "umim_lambada"
_HUB: Final = ("EleutherAI/lambada_openai", "default", "test")


class LambadaTask(ConfigurableTask):  # type: ignore[misc]  # lm-eval ships no types
    """The task ``umim_lambada``.

    Args:
        config: Of lm-eval; its ``metadata`` goes to :func:`load_passages`.
    """

    @one_line_errors()
    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__(
            config={
                "task": LAMBADA,
                "custom_dataset": load_passages,
                "test_split": "test",
                "output_type": "loglikelihood",
                "doc_to_text": "{{context}}",
                "doc_to_target": "{{word}}",
                "should_decontaminate": False,
                "metric_list": [
                    {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
                    {
                        "metric": "perplexity",
                        "aggregation": "perplexity",
                        "higher_is_better": False,
                    },
                ],
                "metadata": {"version": 1.0} | (config or {}).get("metadata", {}),
            }
        )


def load_passages(task_data: str | None = None, **metadata: object) -> DatasetDict:
    """Load the passages for lm-eval.

    Args:
        task_data: Folder of data; by default what ``UMIM_TASK_DATA`` names, else the hub is read.
        **metadata: Ignored; lm-eval passes the task's metadata and the model's arguments.

    Returns:
        The split ``test`` with the columns context and word (a blank in front).

    Raises:
        CorpusError: If a file is missing or malformed, or the hub cannot be reached.
    """
    folder = task_folder(task_data)
    rows = list(_passages(_hub_rows() if folder is None else _file_rows(folder)))
    if not rows:
        raise CorpusError("LAMBADA must hold passages", "none", "Fill the file.")
    return DatasetDict({"test": Dataset.from_list(rows)})


def _file_rows(folder: Path) -> Iterator[tuple[str, object]]:
    for place, _, row in read_objects(find_data_file("lambada", folder)):
        yield place, row.get("text")


def _hub_rows() -> Iterator[tuple[str, object]]:
    for number, row in enumerate(open_hub_dataset(*_HUB)):
        yield f"{_HUB[0]}, row {number}", row.get("text")


def _passages(rows: Iterable[tuple[str, object]]) -> Iterator[dict[str, str]]:
    for place, text in rows:
        context, blank, word = text.rpartition(" ") if isinstance(text, str) else ("", "", "")
        if not (context.strip() and word.strip()):
            raise CorpusError(
                f"{place} must hold a text that ends in a blank and a word",
                text,
                'Write {"text": "..."} without a blank at its end.',
            )
        yield {"context": context, "word": blank + word}
