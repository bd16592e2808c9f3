"""Adaptation settings of a recipe: from a row of the table to a row of the comparison."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.tiny_pipeline import Walk, walk
from tasks.report.comparison import comparison_rows
from tasks.run.stage import Artifact
from umim_core.adaptation import settings
from umim_core.adaptation.settings import Setting
from umim_core.config.recipe import Recipe

pytestmark = pytest.mark.full  # a whole run is in its fixture

NEW_ROW = Setting("WT + DPO + FT", "WT + DPO", "task", "sft")


@pytest.fixture(scope="module")
def run(tiny_run: Walk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    """A run, on a copy of a whole one's artifacts, that asks for a new row and a random start."""
    raw = tiny_run.recipe.model_dump(mode="json")
    raw["adapt"]["settings"] = [NEW_ROW.name, "Task-trained"]
    raw["adapt"]["sft"]["learning_rate"] /= 2  # or a DPO that kept its start leaves WT + FT
    root = shutil.copytree(tiny_run.root, tmp_path_factory.mktemp("settings") / "root")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "SETTINGS", (*settings.SETTINGS, NEW_ROW))
        yield walk(root, Recipe.model_validate(raw))


def weights(artifact: Artifact) -> bytes:
    return (artifact.path / "checkpoint" / "model.safetensors").read_bytes()


def test_a_row_of_the_table_is_all_that_a_new_setting_needs(run: Walk) -> None:
    assert list(run.results[0].settings) == ["WT", "Task-trained", NEW_ROW.name]
    shown = {row.setting: row for row in comparison_rows(run.results, run.recipe.seed)}
    assert list(shown) == list(run.results[0].settings)
    assert shown[NEW_ROW.name].metric("top1") is not None
    assert shown[NEW_ROW.name].score(NEW_ROW.name) is not None


def test_settings_that_are_not_asked_for_are_made_only_to_start_from(run: Walk) -> None:
    measured = ["evaluate", "task-score"]
    assert run.executed() == ["dpo", "sft", "sft", *measured, *measured]
    made = [call.artifact for call in run.calls if call.name in ("with-rules", "dpo", "sft")]
    rules, preferred, _, tuned = made
    assert preferred.manifest()["inputs"]["start"] == rules.digest
    assert tuned.manifest()["inputs"]["start"] == preferred.digest


def test_a_setting_from_random_weights_has_the_task_rules_and_its_own_module(run: Walk) -> None:
    (task_rules,) = (call.artifact for call in run.calls if call.name == "task-rules")
    made = run.results[0].settings
    trained = made["Task-trained"]
    assert trained.manifest()["inputs"]["start"] == task_rules.digest
    table = Path("rules/rules.parquet")
    assert (trained.path / "checkpoint" / table).read_bytes() == (
        task_rules.path / table
    ).read_bytes()
    assert weights(trained) not in (weights(made["WT"]), weights(made[NEW_ROW.name]))
