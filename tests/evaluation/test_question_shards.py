"""Shards of a task's questions: the same prompts whoever scores them, and no question twice."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")

from datasets import Dataset, DatasetDict

from umim_core.errors import EvaluationError
from umim_core.evaluation.harness import UmimLM
from umim_core.evaluation.tasks.question_shards import described, score_range, shard_seed
from umim_core.evaluation.tasks.task_runs import load_tasks

WORDS = [f"w{number}" for number in range(1, 10)]


def rows(**_: object) -> DatasetDict:
    return DatasetDict({"test": Dataset.from_list([{"text": word} for word in WORDS])})


def choices(**options: object) -> Any:
    config = {
        "task": "choices",
        "custom_dataset": partial(rows),
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}} w1",
        "doc_to_choice": ["w2", "w3"],
        "doc_to_target": 1,
        "metric_list": [{"metric": "acc"}],
        **options,
    }
    return load_tasks([config])["choices"]


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> UmimLM:
    return UmimLM(tiny_checkpoint, "none", batch_size=4)


def test_examples_do_not_depend_on_what_was_scored_before(model: UmimLM) -> None:
    task = choices(num_fewshot=3)
    fresh = score_range(model, task, ["acc"], 2, 4)
    score_range(model, task, ["acc"], 0, 1)
    assert score_range(model, task, ["acc"], 2, 4) == fresh
    assert len(set(fresh.prompts)) == len(fresh.values["acc"]) == 2


def test_a_task_with_several_filters_is_refused(model: UmimLM) -> None:
    first = {"filter": [{"function": "take_first"}]}
    task = choices(filter_list=[{"name": "strict", **first}, {"name": "loose", **first}])
    with pytest.raises(EvaluationError, match="strict, loose"):
        score_range(model, task, ["acc"], 0, 2)
    with pytest.raises(EvaluationError, match="strict, loose"):  # before any model is loaded
        described(task, "digest")


def test_shards_of_other_seeds_draw_other_answers() -> None:
    assert len({shard_seed(seed, first) for seed in range(8) for first in range(8)}) == 64
    assert shard_seed(0, 1) == shard_seed(0, 1) != shard_seed(1, 0)
