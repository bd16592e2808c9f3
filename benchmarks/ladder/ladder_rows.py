"""Rows of the ladder: forms of merging and kinds of training rows, as a table.

A row is a step from the row that it is compared with. The module of the paper's form makes a
span's embedding alone; ``umim_core.config.form`` says what the policies of a form are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from umim_core.config.form import ModuleForm
from umim_core.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class LadderRow:
    """One row of the ladder.

    Attributes:
        words: What is trained, for people.
        over: The row that it is compared with; None for the first.
        policies: Those of its form that are not the paper's.
        kinds: Shares of training rows of other kinds, by field of ``DistillConfig``.
    """

    words: str
    over: str | None
    policies: Mapping[str, object] = field(default_factory=dict)
    kinds: Mapping[str, float] = field(default_factory=dict)

    @property
    def form(self) -> ModuleForm:
        """The form of its module."""
        return ModuleForm.model_validate(self.policies)


_LEARNED: Final = {"module_positions": "learned"}
_LAST: Final = {**_LEARNED, "residual": "last"}
_KEPT: Final = {**_LAST, "unit_positions": "preserved"}
_ADAPTED: Final = {**_KEPT, "adapter_rank": 8}
_DEPTHS: Final = (2, 4, 6, 8)
_MIXED_AT: Final = 4  # depth of the rows that change what is trained on


def ladder(rule_rows: int) -> dict[str, LadderRow]:
    """Return the rows of the ladder by name, each after the one that it is compared with."""
    mixed = {**_ADAPTED, "merge_depth": _MIXED_AT}
    return {
        "paper": LadderRow("the paper's form", None),
        "last": LadderRow("residual: last embedding, learned positions", "paper", _LAST),
        "preserved": LadderRow("last, preserved positions", "last", _KEPT),
        "rule-rows": LadderRow(
            "last, preserved, rule rows", "preserved", {**_KEPT, "rule_rows": rule_rows}
        ),
        "adapters": LadderRow("last, preserved, adapters of rank 8", "preserved", _ADAPTED),
        "depth-4-module": LadderRow(
            "merge depth 4, no adapters", "preserved", {**_KEPT, "merge_depth": 4}
        ),
        **{
            f"depth-{depth}": LadderRow(
                f"adapters, merge depth {depth}", "adapters", {**_ADAPTED, "merge_depth": depth}
            )
            for depth in _DEPTHS
        },
        "prompt-rows": LadderRow(
            f"depth {_MIXED_AT}, half of the rows with a raw rest",
            f"depth-{_MIXED_AT}",
            mixed,
            {"prompt_rows": 0.5},
        ),
        "copy-rows": LadderRow(
            f"depth {_MIXED_AT}, half of the rows repeat themselves raw",
            f"depth-{_MIXED_AT}",
            mixed,
            {"copy_rows": 0.5},
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
