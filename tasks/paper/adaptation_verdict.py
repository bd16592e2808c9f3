"""Verdicts on a task adaptation: what its figures bear out, and how often that might be chance.

Made of ``adaptation.json``; every comparison that is told is counted, see :func:`number_compared`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tasks.paper.adaptation_rows import (
    CONTROL,
    RULES_ALONE,
    adaptation_rows,
    clear,
    label,
    reach,
)
from tasks.report.page_template import Report, filled_in
from umim_core.adaptation.settings import ADAPTED, WT

_BY_PREFERENCE: Final = "WT + DPO"  # trained as controls are
_BESIDE_CONTROLS: Final = {_BY_PREFERENCE: "DPO", ADAPTED: "DPO after SFT"}


def verdict(place: Report) -> str:
    """Return what the figures of a backbone bear out, a line each."""
    rows = adaptation_rows(place)
    lines = [
        *_guessing(place),
        _against_base(rows, "Accuracy", "", "{difference!p:+.1f} points"),
        _against_base(rows, "Margin", "margin_", "{margin_difference:+.3f} nats"),
        *_against_others(rows),
        *_missing_controls(rows),
    ]
    return "\n".join(f"- {line}" for line in lines)


def _against_base(rows: list[Report], name: str, prefix: str, shown: str) -> str:
    """Say which rows lie clearly above the base model, clearly below it, and how many neither."""
    found = [
        (
            f"{label(row)} ({filled_in(shown, row)})",
            clear(row[f"{prefix}difference"], row[f"{prefix}reach"]),
        )
        for row in rows
    ]
    return f"{name} against the base model, {_sides(found)}"


def _sides(found: list[tuple[str, int]]) -> str:
    """Name what is clearly above and clearly below, and count the others."""
    above, below = (
        ", ".join(words for words, side in found if side == wanted) or "none" for wanted in (1, -1)
    )
    neither = sum(side == 0 for _, side in found)
    return (
        f"clearly above: {above}; clearly below: {below}; not told apart: {neither} of "
        f"{len(found)}."
    )


def _guessing(place: Report) -> Iterator[str]:
    """Say so where the base model does not do the task."""
    base, chance = place["base"], place.get("chance")
    if chance is not None and clear(base["accuracy"] - chance, reach([base], "accuracy")) < 1:
        yield (
            f"The base model ({base['accuracy']:.1%}) is not clearly better than guessing "
            f"({chance:.1%}): what merging costs or training adds says little here."
        )


def _compared(row: Report, name: str) -> tuple[str, int]:
    """Return a row's difference to another model in words, paired by question, and its side."""
    found = row["against"][name]
    words = f"{label(row)} ({filled_in('{difference!p:+.1f}', found)} points)"
    return words, clear(found["difference"], found["reach"])


def _others(rows: list[Report]) -> Iterator[tuple[str, str, list[Report]]]:
    """Yield what trained settings are compared with: words for it, its name, the settings' rows.

    These are WT, the rules alone at equal threshold, and every control: first with what is trained
    like it, then with what is trained longer. A training that kept its start is not compared with
    controls, for it is none by DPO; nor is a control that did.
    """

    def compared(name: str, **of: object) -> list[Report]:
        return [row for row in rows if name in row["against"] and of.items() <= row.items()]

    for row in rows:
        if row["setting"] == WT:
            own = filled_in("its own rules, TR {token_reduction:.1%}", row)
            yield f"Training, against WT ({own})", WT, compared(WT)
    yield "Training, against the rules alone at equal threshold", RULES_ALONE, compared(RULES_ALONE)
    for name in (row["setting"] for row in rows if row["kind"] == CONTROL and not row["kept"]):
        for setting, words in _BESIDE_CONTROLS.items():
            told = f"{words}, against {name}, which has DPO alone and merges nothing"
            yield told, name, compared(name, setting=setting, kept=False)


def _against_others(rows: list[Report]) -> Iterator[str]:
    """Say what training adds to the rules, and how it compares with training without merging."""
    for words, name, found in _others(rows):
        if found:
            yield f"{words}, {_sides([_compared(row, name) for row in found])}"


def _missing_controls(rows: list[Report]) -> Iterator[str]:
    """Say what a comparison with controls would need."""
    for row in rows:
        if row["kind"] == CONTROL and row["kept"]:
            yield (
                f"The control {row['setting']} kept its start, which is the base model: how far it "
                "would come by another training is not known."
            )
    if not any(row["kind"] == CONTROL for row in rows):
        yield "No control without merging was run: what training alone would give is not known."
    elif not any(row["setting"] == _BY_PREFERENCE for row in rows):
        yield f"{_BY_PREFERENCE} was not run: no setting is trained by DPO alone, as controls are."


def number_compared(report: Report) -> str:
    """Say how many differences the page calls clear or not: of accuracies, margins, and others."""
    found = [adaptation_rows(place) for place in report["backbones"]]
    count = sum(2 * len(rows) + sum(len(own) for *_, own in _others(rows)) for rows in found)
    return (
        f"- {count} differences are called clear or not. If nothing differed, up to 5 % of them "
        f"({0.05 * count:.1f}) would seem clear by chance."
    )
