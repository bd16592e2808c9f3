"""Rows of the ladder: forms of the module, losses, and blocks that the control trains, as a table.

A row is a step from the row that it is compared with. The module of the paper's form makes a
span's embedding alone; ``umim_core.config.form`` says what the policies of a form are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from umim_core.config.form import ModuleForm
from umim_core.config.hidden_term import HiddenTerm
from umim_core.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class LadderRow:
    """One row of the ladder.

    Attributes:
        words: What is trained, for people.
        over: The row that it is compared with; None for the first.
        policies: Those of its form that are not the paper's.
        terms: Hidden-state terms of its loss.
        blocks: Blocks of the student's backbone that are trained, too: the control, never shipped.
    """

    words: str
    over: str | None
    policies: Mapping[str, object] = field(default_factory=dict)
    terms: tuple[HiddenTerm, ...] = ()
    blocks: tuple[int, ...] = ()

    @property
    def form(self) -> ModuleForm:
        """The form of its module."""
        return ModuleForm.model_validate(self.policies)


_LEARNED: Final = {"module_positions": "learned"}
_LAST: Final = {**_LEARNED, "residual": "last"}
_KEPT: Final = {"unit_positions": "preserved"}
_ENDS: Final = (0, -1)  # first and last block
_LAST_LAYER: Final = HiddenTerm(layers="last")
_ALL_LAYERS: Final = HiddenTerm(layers="all")


def ladder(rule_rows: int) -> dict[str, LadderRow]:
    """Return the rows of the ladder by name, each after the one that it is compared with.

    Args:
        rule_rows: Rule rows of the rows that have some.
    """
    rows = {"rule_rows": rule_rows}
    together = {**_LAST, **_KEPT, **rows}
    return {
        "paper": LadderRow("the paper's form", None),
        "positions": LadderRow("learned module positions", "paper", _LEARNED),
        "preserved-alone": LadderRow("preserved positions", "positions", {**_LEARNED, **_KEPT}),
        "last": LadderRow("residual: last embedding", "positions", _LAST),
        "exponential": LadderRow(
            "residual: exponential average", "positions", {**_LEARNED, "residual": "exponential"}
        ),
        "preserved": LadderRow("last, preserved positions", "last", {**_LAST, **_KEPT}),
        "hidden-last": LadderRow("last, states of the last layer", "last", _LAST, (_LAST_LAYER,)),
        "hidden-all": LadderRow("last, states of all layers", "last", _LAST, (_ALL_LAYERS,)),
        "rule-rows": LadderRow("last, rule rows", "last", {**_LAST, **rows}),
        "rows-preserved": LadderRow("last, preserved, rule rows", "preserved", together),
        "together": LadderRow(
            "last, preserved, rule rows, all layers", "preserved", together, (_ALL_LAYERS,)
        ),
        "paper-unfrozen": LadderRow(
            "control: the paper's form, first and last block trained", "paper", blocks=_ENDS
        ),
        "preserved-unfrozen": LadderRow(
            "control: last, preserved, first and last block trained",
            "preserved",
            {**_LAST, **_KEPT},
            blocks=_ENDS,
        ),
    }


def choose(rows: Mapping[str, LadderRow], names: Sequence[str]) -> dict[str, LadderRow]:
    """Return the rows of these names, in the order of the ladder; all without names.

    A row whose step starts from a row that is left out is compared with the nearest one before
    that is not: the step is then a longer one.

    Raises:
        ConfigError: If there is no row of a name.
    """
    for name in names:
        if name not in rows:
            raise ConfigError(
                f"--only must name rows of the ladder ({', '.join(rows)})",
                name,
                did_you_mean(name, rows) or "Leave it out for all rows.",
            )
    chosen = {name: row for name, row in rows.items() if not names or name in names}
    return {name: replace(row, over=_start(row, rows, chosen)) for name, row in chosen.items()}


def _start(
    row: LadderRow, rows: Mapping[str, LadderRow], chosen: Mapping[str, LadderRow]
) -> str | None:
    """Return the nearest row before a row that was chosen; None where there is none."""
    over = row.over
    while over is not None and over not in chosen:
        over = rows[over].over
    return over
