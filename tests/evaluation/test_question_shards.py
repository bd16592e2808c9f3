"""Shards of a task's questions: the same prompts whoever scores them, and no question twice."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is the `eval` extra")

from datasets import Dataset, DatasetDict

from umim_core.evaluation.harness import UmimLM
from umim_core.evaluation.questions import described, score_range, shard_seed
from umim_core.evaluation.tasks.lm_eval_tasks import load_tasks

WORDS = [f"w{number}" for number in range(1, 10)]


def rows(**_: object) -> DatasetDict:
    return DatasetDict({"test": Dataset.from_list([{"text": word} for word in WORDS])})


def task_of(kind: str, metric: str, **options: object) -> Any:
    config = {
        "task": kind,
        "custom_dataset": partial(rows),
        "test_split": "test",
        "output_type": kind,
        "doc_to_text": "{{text}} w1",
        "metric_list": [{"metric": metric}],
        **options,
    }
    return load_tasks([config])[kind]


def choices(**options: object) -> Any:
    own = {"doc_to_choice": ["w2", "w3"], "doc_to_target": 1}
    return task_of("multiple_choice", "acc", **own, **options)


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> UmimLM:
    return UmimLM(tiny_checkpoint, "none", batch_size=4)


def test_examples_do_not_depend_on_what_was_scored_before(model: UmimLM) -> None:
    task = choices(num_fewshot=3)
    fresh = score_range(model, task, range(2, 4))[0]
    score_range(model, task, range(1))
    assert score_range(model, task, range(2, 4))[0] == fresh
    assert len(set(fresh.prompts)) == len(fresh.values["acc"]) == 2


def test_a_task_with_several_filters_has_a_figure_of_each(model: UmimLM) -> None:
    first = {"filter": [{"function": "take_first"}]}
    task = choices(filter_list=[{"name": "strict", **first}, {"name": "loose", **first}])
    found, _ = score_range(model, task, range(2))
    assert found.values.keys() == {"acc,strict", "acc,loose"}
    assert found.values["acc,strict"] == score_range(model, choices(), range(2))[0].values["acc"]
    assert described(task, "digest").count == len(WORDS)


def test_answers_of_any_generating_task_are_kept(model: UmimLM) -> None:
    own = {"doc_to_target": "w2", "generation_kwargs": {"until": [], "max_gen_toks": 3}}
    task = task_of("generate_until", "exact_match", **own)
    found, _ = score_range(model, task, range(2))
    assert [len(texts) for texts in found.answers] == [1, 1]
    assert found.values.keys() == {"exact_match"}
    assert described(task, "x").limits == {"new_tokens": 3, "answers": 1}


def test_shards_of_other_seeds_draw_other_answers() -> None:
    assert len({shard_seed(seed, first) for seed in range(8) for first in range(8)}) == 64
    assert shard_seed(0, 1) == shard_seed(0, 1) != shard_seed(1, 0)
