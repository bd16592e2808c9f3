"""Tables of the paper: tasks, data, checkpoints and prompts that a stage or a worker refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.data.table_jobs import ModelPlace, measure_text, table_row
from umim_core.config.table_recipe import TableText
from umim_core.errors import CheckpointError, EvaluationError
from umim_core.evaluation.tasks.question_records import ShardScores
from umim_core.text.sources import source_of


def test_a_checkpoint_that_another_machine_has_otherwise_is_refused(
    tiny_checkpoint: Path,
) -> None:
    place = ModelPlace(str(tiny_checkpoint), "0" * 64, "cpu", "float32", 4)
    text = TableText(source=source_of(("none.txt",)))
    with pytest.raises(CheckpointError, match=r"the same checkpoint.* instead of 000000000000"):
        measure_text(place, text)


def test_other_prompts_under_another_setting_are_refused() -> None:
    base, own = (ShardScores({"acc": [1.0]}, (0, 0), (0, 0), [prompt]) for prompt in "ab")
    with pytest.raises(EvaluationError, match="other prompts under own"):
        table_row("t", "own", own, base)
