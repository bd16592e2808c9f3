"""Stage keys: every input is in the key, or in the list of exceptions with a reason.

Each test changes one field or one part of an input at a time and asks for the key. What is missing
in a key shows as an old result for a new question; what is there without need, as work done twice.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import tasks.stages
from support.stage_keys.adaptation import adaptation_calls
from support.stage_keys.inputs import Inputs
from support.stage_keys.measuring import measuring_calls, page_calls
from support.stage_keys.rules import rule_calls
from support.stage_keys.tables import table_calls
from support.stage_keys.texts import text_calls
from support.stage_keys.training import training_calls
from support.stage_keys.variations import StageCall, key_of, keys_of_variations
from tasks.cluster.lease import ClusterLease
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.recipe import DEFAULT_TASK, ClusterConfig
from umim_core.task_sets.generation_spec import GENERATION_TASKS
from umim_core.task_sets.spec import TASKS

NAMES = (
    "corpus of docstrings", "corpus of files", "corpus that a model wrote", "mixture", "generate",
    "task", "tokenize", "count", "count without documents or a sample", "filter", "confidence",
    "confidence-rules", "given-rules", "task-rules", "distill", "with-rules", "sft",
    "sft from random weights", "dpo", "evaluate", "task-score",
    "task-score of the base model", "benchmark", "report",
    "ablation", "questions", "questions of generated answers", "mined", "shards",
    "shards of generated answers", "text", "table", "choices", "start", "control",
    "choice-scores", "adaptation",
)  # fmt: skip


MAKERS = (
    text_calls, rule_calls, training_calls, measuring_calls, page_calls, table_calls,
    adaptation_calls,
)  # fmt: skip


@pytest.fixture(scope="module")
def inputs(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Callable[[str, int], PreTrainedModel],
    word_tokenizer: Callable[[list[str]], PreTrainedTokenizerFast],
    tiny_checkpoint: Path,
) -> Inputs:
    folder = tmp_path_factory.mktemp("calls")
    tokenizer = word_tokenizer(["<eos>", *(f"w{i}" for i in range(1, 31)), "<end>"])
    tokenizer.backend_tokenizer.add_special_tokens(["<end>"])
    tokenizer.chat_template = "{{ messages[0].content }}"
    trained = Checkpoint.load(tiny_checkpoint)
    with torch.no_grad():
        next(trained.module.parameters()).add_(1.0)
    trained.save(folder / "trained")
    models = (tiny_model("llama", seed) for seed in (0, 1))
    return Inputs(folder, *models, tokenizer, (tiny_checkpoint, folder / "trained"))


@pytest.fixture(scope="module")
def calls(inputs: Inputs) -> dict[str, StageCall]:
    return {name: call for make in MAKERS for name, call in make(inputs).items()}


@pytest.fixture(autouse=True)
def another_task(monkeypatch: pytest.MonkeyPatch) -> None:
    for known, task in ((TASKS, DEFAULT_TASK), (GENERATION_TASKS, "umim_ruler_1k")):
        name = f"{task}-another"  # what the variations of a name make of it
        monkeypatch.setitem(known._found, name, replace(known.find(task), name=name))


@pytest.mark.parametrize("name", NAMES)
def test_everything_a_stage_is_given_is_in_its_key(
    name: str, calls: dict[str, StageCall], inputs: Inputs, tmp_path: Path
) -> None:
    call = calls[name]
    base = key_of(call, call.given, tmp_path)
    assert key_of(call, call.given, tmp_path / "elsewhere") == base
    unused, missing, needless = set(call.free), [], []
    for where, key in keys_of_variations(call, inputs.special, inputs.artifacts, tmp_path):
        # "cell.task" stands for cell.task and cell.tasks, "train." for all below train
        free = [
            start
            for start in call.free
            if re.match(rf"{re.escape(start)}(?:(?<=\.)|s?(?!\w))", where)
        ]
        unused.difference_update(free)
        if not free and key == base:
            missing.append(where)
        if free and key != base:
            needless.append(where)
    assert not missing, "these change nothing in the key"
    assert not needless, f"these must keep the key: {[call.free.get(w) for w in needless]}"
    assert not unused, "nothing of this name was varied"


def test_every_stage_is_among_them(calls: dict[str, StageCall]) -> None:
    (folder,) = tasks.stages.__path__
    found = {
        function
        for path in Path(folder).glob("*.py")
        for name, function in inspect.getmembers(
            importlib.import_module(f"tasks.stages.{path.stem}")
        )
        if name.endswith("_stage") and not name.startswith("_") and name != "run_stage"
    }
    assert {call.function for call in calls.values()} == found
    assert set(calls) == set(NAMES)


def test_machines_have_benchmarks_of_their_own(
    calls: dict[str, StageCall], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = calls["benchmark"]
    elsewhere = {"lease": ClusterLease(ClusterConfig(workers=2, address="host:1"))}
    here, there = (key_of(call, call.given | at, tmp_path) for at in ({}, elsewhere))
    monkeypatch.setattr("tasks.stages.evaluate.machine", lambda threads: f"another, {threads}")
    assert key_of(call, call.given, tmp_path) != here
    assert key_of(call, call.given | elsewhere, tmp_path) == there


def test_a_benchmark_of_this_process_is_of_the_threads_of_torch(
    calls: dict[str, StageCall], tmp_path: Path
) -> None:
    call, before = calls["benchmark"], torch.get_num_threads()
    in_process = {"lease": ClusterLease(ClusterConfig(workers=0, cpus=3))}
    keys = []
    try:
        for threads in (1, 3, 1):
            torch.set_num_threads(threads)
            keys.append(key_of(call, call.given | in_process, tmp_path))
    finally:
        torch.set_num_threads(before)
    assert keys[0] == keys[2] != keys[1]
    assert keys[1] == key_of(call, call.given, tmp_path), "a worker with as many threads"
