"""Tables of the paper: tasks, data, checkpoints and prompts that a stage or a worker refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.tiny_table import run_table, tiny_table, write_questions
from tasks.data.table_jobs import (
    ModelPlace,
    TextJob,
    measure_text,
)
from tasks.data.table_scores import table_row
from umim_core.config.table_recipe import TableText
from umim_core.errors import CheckpointError, ConfigError, EvaluationError
from umim_core.evaluation.tasks.shard_values import ShardScores
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
