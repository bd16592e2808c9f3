"""README's first screen shows the default checkpoint and no other one."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest

from docs.make.document import RESULTS
from docs.make.first_screen import first_screen
from tasks.report.page_template import Report
from umim_core.checkpoint.default_checkpoint import DEFAULT_CHECKPOINT
from umim_core.errors import ConfigError


@pytest.fixture
def tasks(tmp_path: Path) -> Report:
    """The committed results of tasks; the other result files lie in the folder of the test."""
    for name in ("smollm2", "engine-smollm2", "table-long-context-smollm2"):
        shutil.copy(RESULTS / f"{name}.json", tmp_path)
    found: Report = json.loads((RESULTS / "stock_tasks.json").read_text("utf-8"))
    return found


def test_a_checkpoint_that_was_measured_first_is_not_shown(tasks: Report, tmp_path: Path) -> None:
    label = f"{DEFAULT_CHECKPOINT}, prompt"
    other = tasks["settings"][label] | {"checkpoint": "new"}
    worse = copy.deepcopy(tasks["mean"][label])
    worse["acc"]["mean"] = 0.25
    tasks["settings"] = {"new, prompt": other, **tasks["settings"]}
    tasks["mean"]["new, prompt"] = worse
    (tmp_path / "stock_tasks.json").write_text(json.dumps(tasks), "utf-8")
    shown = first_screen(tmp_path)
    assert shown == first_screen()
    assert "25.0 %" not in shown


def test_lengths_of_long_prompts_are_those_of_the_result_file(
    tasks: Report, tmp_path: Path
) -> None:
    (tmp_path / "stock_tasks.json").write_text(json.dumps(tasks), "utf-8")
    place = tmp_path / "table-long-context-smollm2.json"
    table = json.loads(place.read_text("utf-8"))
    table["scores"] = [row for row in table["scores"] if row["task"] == "umim_ruler_2k"]
    place.write_text(json.dumps(table), "utf-8")
    assert "among 1,910 to 1,915 tokens (RULER, 8 questions)" in first_screen(tmp_path)


@pytest.mark.parametrize("setting", ["original", "merge=prompt, digits and 16 raw"])
def test_long_prompts_without_a_shown_setting_are_refused(
    tasks: Report, tmp_path: Path, setting: str
) -> None:
    (tmp_path / "stock_tasks.json").write_text(json.dumps(tasks), "utf-8")
    place = tmp_path / "table-long-context-smollm2.json"
    table = json.loads(place.read_text("utf-8"))
    table["scores"] = [row for row in table["scores"] if row["setting"] != setting]
    place.write_text(json.dumps(table), "utf-8")
    with pytest.raises(ConfigError, match=f"long-context-smollm2.json must have .*'{setting}'"):
        first_screen(tmp_path)


def test_results_without_the_default_checkpoint_are_refused(tasks: Report, tmp_path: Path) -> None:
    for setting in tasks["settings"].values():
        setting["checkpoint"] = "new"
    (tmp_path / "stock_tasks.json").write_text(json.dumps(tasks), "utf-8")
    with pytest.raises(ConfigError, match=r"stock_tasks\.json must have .*under its own name"):
        first_screen(tmp_path)
