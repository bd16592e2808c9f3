"""Tables of the paper: tasks, data, checkpoints and prompts that a stage or a worker refuses."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from support.tiny_table import QUESTIONS, run_table, tiny_table, write_questions
from tasks.data.table_jobs import (
    ModelPlace,
    ShardJob,
    TextJob,
    find_questions,
    measure_text,
    score_shard,
)
from tasks.data.table_scores import table_row
from umim_core.config.table_recipe import TableText
from umim_core.errors import CheckpointError, ConfigError, EvaluationError
from umim_core.evaluation.tasks.shard_values import QuestionSet, QuestionSource, ShardScores
from umim_core.text.sources import source_of


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_questions(tmp_path_factory.mktemp("questions"))


@pytest.mark.full  # lm-eval reads thousands of files to know its tasks
def test_an_unknown_task_is_refused_with_those_there_are(
    tiny_checkpoint: Path, questions: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="umim_docstring"):
        run_table(tmp_path, tiny_table(tiny_checkpoint, questions, tasks=["umim_docstrinsg"]))


def test_task_data_of_the_environment_is_refused_behind_a_hub(
    tiny_checkpoint: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMIM_TASK_DATA", str(questions))
    recipe = tiny_table(tiny_checkpoint, questions, task_data=None, hub=str(questions))
    with pytest.raises(ConfigError, match="UMIM_TASK_DATA must not be set"):
        run_table(tmp_path, recipe)


def test_task_data_of_a_workers_own_environment_is_refused(
    tiny_checkpoint: Path, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UMIM_TASK_DATA", str(questions))
    source, place = QuestionSource("umim_docstrings"), ModelPlace("absent", "", "cpu", "float32", 4)
    setting = tiny_table(tiny_checkpoint, questions).settings[0]
    job = ShardJob(place, setting, source, QuestionSet(7, "", ("acc",)), 0, 2)
    for read in (partial(find_questions, source), partial(score_shard, job)):
        with pytest.raises(ConfigError, match="UMIM_TASK_DATA must not be set"):
            read()
    known = QuestionSource("umim_docstrings", folder=str(questions))  # which wins over the variable
    assert find_questions(known).count == QUESTIONS


def test_a_checkpoint_that_another_machine_has_otherwise_is_refused(
    tiny_checkpoint: Path,
) -> None:
    place = ModelPlace(str(tiny_checkpoint), "0" * 64, "cpu", "float32", 4)
    text = TableText(source=source_of(("none.txt",)))
    with pytest.raises(CheckpointError, match=r"the same checkpoint.* instead of 000000000000"):
        measure_text(TextJob(place, text))


def test_other_prompts_under_another_setting_are_refused() -> None:
    base, own = (ShardScores({"acc": [1.0]}, (0, 0), (0, 0), [prompt]) for prompt in "ab")
    with pytest.raises(EvaluationError, match="other prompts under own"):
        table_row("t", "own", own, base)
