"""Adaptation settings as a table: start, rules, training and measurements of each.

A row is all that a new setting needs. Flows train and measure what the table says; reports and the
comparison take the order and the names from it. Which tokens of a task sequence may merge is a
matter of the task, not of the setting; preference training merges the shared context only.

Source: paper, "Adaptation and Ablation Settings", table task_adaptation_settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from umim_core.errors import look_up

Rules = Literal["none", "corpus", "task"]
Training = Literal["none", "distill", "sft", "dpo"]
Measure = Literal["alignment", "accuracy", "speed"]
BASE: Final = "base"
WT: Final = "WT"
ADAPTED: Final = "Task-Adapted"  # the paper's full route


@dataclass(frozen=True)
class Setting:
    """One compared way to use the backbone, by the name that papers, checkpoints and reports have.

    Attributes:
        start: Setting whose merge module it begins with; None for random weights, or no module.
        rules: Rules of the corpus or of the task; ``none`` merges nothing. A trained setting keeps
            the rules of its start.
        training: ``distill`` on the corpus, ``sft`` (distillation on task sequences) or ``dpo``
            (preference between answers).
        measured: ``alignment`` with perplexity on held-out text, which gives the setting its row
            of the comparison; ``accuracy`` on the task; ``speed`` (of one setting).
    """

    name: str
    start: str | None
    rules: Rules
    training: Training
    measured: tuple[Measure, ...] = ("alignment", "accuracy")


SETTINGS: tuple[Setting, ...] = (
    Setting(BASE, None, "none", "none", ("accuracy",)),
    Setting(WT, None, "corpus", "distill", ("alignment", "accuracy", "speed")),
    Setting("WT + Rules", WT, "task", "none"),
    Setting("WT + FT", "WT + Rules", "task", "sft"),
    Setting("WT + DPO", "WT + Rules", "task", "dpo"),
    Setting("Task-trained", None, "task", "sft"),
    Setting(ADAPTED, "WT + FT", "task", "dpo"),
)
"""All settings, each below the one that it starts from."""


def setting_names() -> list[str]:
    return [row.name for row in SETTINGS]


def find_setting(name: str) -> Setting:
    return _find({row.name: row for row in SETTINGS}, name)


def measures(name: str, measure: Measure) -> bool:
    return measure in find_setting(name).measured


def adaptation_steps(names: Sequence[str]) -> list[Setting]:
    """Return the settings that must be made for the named ones, each behind its start.

    ``adaptation_steps(["WT + FT"])`` are the rows ``WT + Rules`` and ``WT + FT``.
    """
    known = {row.name: row for row in SETTINGS if row.start is not None or row.rules == "task"}
    needed: set[str] = set()
    for name in names:
        row: Setting | None = _find(known, name)
        while row is not None:
            needed.add(row.name)
            row = known.get(row.start or "")
    return [row for row in SETTINGS if row.name in needed]


def _find(known: Mapping[str, Setting], name: str) -> Setting:
    remedy = "The table is in umim_core/adaptation/settings.py."
    return look_up(known, name, "an adaptation setting", remedy)
