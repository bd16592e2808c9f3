"""Measurements on the workers of a cluster: the numbers of one process, and nothing twice.

The process of the flow must not measure: here it would fail if it did.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tasks.stages.evaluate as stage
from support.kills import kill_once
from support.tiny_pipeline import Walk, stages_in, walk_on_workers
from tasks.run.stage import machine_name

MEASURED = ("evaluate", "task-score")


@pytest.fixture
def driver_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = os.getpid()

    def elsewhere(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:  # a call of a stage takes it to a worker
            assert os.getpid() != driver, "the process of the flow computes"
            return function(*args, **kwargs)

        return call

    measured = ("evaluate_alignment", "perplexity_figures", "evaluate_task", "measure_throughput")
    for name in measured:
        monkeypatch.setattr(stage, name, elsewhere(getattr(stage, name)))


def copied(run: Walk, folder: Path, *but: str) -> Path:
    later = shutil.ignore_patterns(*(but or (*MEASURED, "benchmark", "report")))
    return Path(shutil.copytree(run.root, folder / "root", ignore=later))


def numbers(run: Walk) -> dict[str, dict[str, float]]:
    return {call.artifact.key: call.artifact.metrics for call in run.calls if call.name in MEASURED}


def recipe(run: Walk) -> str:
    return run.recipe.model_copy(update={"benchmark": None}).model_dump_json()


@pytest.mark.full
def test_two_workers_give_the_numbers_of_one_process(
    tiny_run: Walk, tmp_path: Path, driver_computes_nothing: None
) -> None:
    run = walk_on_workers(copied(tiny_run, tmp_path), recipe(tiny_run), 2)
    assert set(run.executed()) == {"evaluate", "task-score"}
    assert numbers(run) == numbers(tiny_run)


@pytest.mark.full
def test_throughput_is_timed_by_a_worker_whose_threads_are_in_the_key(
    tiny_run: Walk, tmp_path: Path, driver_computes_nothing: None
) -> None:
    root = copied(tiny_run, tmp_path, "benchmark", "report")
    run = walk_on_workers(root, tiny_run.recipe.model_dump_json(), 2)
    (there,) = [call.artifact for call in run.calls if call.name == "benchmark"]
    (here,) = [call.artifact for call in tiny_run.calls if call.name == "benchmark"]
    assert run.executed() == ["benchmark"]
    assert there.metrics.keys() == here.metrics.keys()
    assert len(stage.throughput_rows(there)) == len(stage.throughput_rows(here)) > 0
    assert json.loads((there.path / "machine.json").read_text("utf-8")) == machine_name(2)
    assert there.manifest()["config"]["machine"] == machine_name(2)


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_run_measures_nothing_twice(tiny_run: Walk, tmp_path: Path, workers: int) -> None:
    root, asked = copied(tiny_run, tmp_path), recipe(tiny_run)
    kill_once(partial(stages_in, root, MEASURED), walk_on_workers, root, asked, workers)
    before = stages_in(root, MEASURED)
    assert 0 < len(before) < len(numbers(tiny_run))
    again = walk_on_workers(root, asked, workers)
    after = stages_in(root, MEASURED)
    assert {name: after[name] for name in before} == before, "what was measured is not touched"
    assert len(again.executed()) == len(after) - len(before)
    assert numbers(again) == numbers(tiny_run)
