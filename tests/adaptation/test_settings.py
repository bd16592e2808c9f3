"""The table of adaptation settings against the paper's, and the steps of a choice of them."""

from __future__ import annotations

import pytest

from umim_core.adaptation import settings
from umim_core.adaptation.settings import SETTINGS, WT, Setting, adaptation_steps, find_setting
from umim_core.errors import ConfigError

# The paper's table "Task-adaptation and ablation settings": initialisation, SFT, RL.
PAPER = {
    "WT + Rules": ("WikiText base", False, False),
    "WT + FT": ("WikiText base", True, False),
    "Task-Adapted": ("WikiText base", True, True),
    "Task-trained": ("Random", True, False),
    "WT + DPO": ("WikiText base", False, True),
}


def route(row: Setting) -> list[Setting]:
    """The setting and those it starts from, up to the base module or random weights."""
    return [row] if row.start in (None, WT) else [row, *route(find_setting(str(row.start)))]


def test_the_table_is_the_papers() -> None:
    found = {}
    for row in SETTINGS:
        if row.rules == "task":
            trainings = [step.training for step in route(row)]
            begun = "Random" if route(row)[-1].start is None else "WikiText base"
            found[row.name] = (begun, "sft" in trainings, "dpo" in trainings)
    assert found == PAPER
    trained = [row for row in SETTINGS if row.training != "none" and row.start is not None]
    assert all(find_setting(str(row.start)).rules == row.rules == "task" for row in trained)


def test_starts_are_made_before_what_starts_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Setting("WT + FT on its rules", WT, "corpus", "sft")
    monkeypatch.setattr(settings, "SETTINGS", (*SETTINGS, row))
    for named, made in (
        (["WT + FT"], ["WT + Rules", "WT + FT"]),
        (["Task-Adapted"], ["WT + Rules", "WT + FT", "Task-Adapted"]),
        (["Task-trained"], ["Task-trained"]),
        (["WT + DPO", "WT + Rules"], ["WT + Rules", "WT + DPO"]),
        ([row.name], [row.name]),  # it keeps the rules of its start
    ):
        assert [step.name for step in adaptation_steps(named)] == made


def test_what_is_no_adaptation_is_refused_with_the_list() -> None:
    for name, remedy in (("WT + Rulse", "Did you mean 'WT + Rules'?"), (WT, "The table is")):
        with pytest.raises(
            ConfigError, match=r"one of WT \+ Rules, .*, Task-Adapted; got"
        ) as error:
            adaptation_steps([name])
        assert error.value.value == name and error.value.remedy.startswith(remedy)
