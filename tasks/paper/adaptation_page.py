"""Page and figure of a task adaptation, made of ``adaptation.json`` alone.

The figure has a panel per backbone: change of accuracy against token reduction, a line per setting
through its thresholds. Error bars are the 95 % intervals that make a change clear; what has no
known error has no bar.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final

from tasks.paper.adaptation_rows import (
    CLEARLY,
    CONTROL,
    RULES_ALONE,
    adaptation_rows,
    clear,
    label,
    reach,
)
from tasks.report.charts import Line, Panel, chart, svg_file
from tasks.report.render import Report, page
from tasks.report.row_labels import shown_name
from umim_core.adaptation.settings import ADAPTED, WT, find_setting, setting_names

_TITLE: Final = "Accuracy change against token reduction"


_BY_PREFERENCE: Final = "WT + DPO"  # trained as controls are
_NEXT_TO_CONTROLS: Final = {_BY_PREFERENCE: "DPO", ADAPTED: "DPO after SFT"}


def verdict(place: Report) -> list[str]:
    """Return what the figures of a backbone show, a line each."""
    rows = adaptation_rows(place)
    accuracies = [_judged(row, row["difference"], row["reach"]) for row in rows]
    margins = [_judged(row, row["margin_difference"], row["margin_reach"], "nats") for row in rows]
    return [
        *_guessing(place),
        f"Accuracy against the base model, {_sides(accuracies)}",
        f"Margin against the base model, {_sides(margins)}",
        *(f"{words}, {_sides(_compared(own, name))}" for words, name, own in _others(rows) if own),
        *_missing_controls(rows),
    ]


def _judged(
    row: Report, difference: float, beyond: float | None, unit: str = "points"
) -> tuple[str, int]:
    """Return a row with a difference in words, and the side that it is clearly on."""
    words = f"{difference:+.3f}" if unit == "nats" else f"{100 * difference:+.1f}"
    return f"{label(row)} ({words} {unit})", clear(difference, beyond)


def _compared(rows: Iterable[Report], name: str) -> list[tuple[str, int]]:
    """Return rows with their differences to another model, paired by question."""
    pairs = [(row, row["against"][name]) for row in rows]
    return [_judged(row, to["difference"], to["reach"]) for row, to in pairs]


def _sides(judged: list[tuple[str, int]]) -> str:
    """Name what is clearly above and clearly below, and count the others."""
    above, below = (
        ", ".join(words for words, side in judged if side == wanted) or "none" for wanted in (1, -1)
    )
    neither = sum(side == 0 for _, side in judged)
    return (
        f"clearly above: {above}; clearly below: {below}; no clear difference: {neither} of "
        f"{len(judged)}."
    )


def _guessing(place: Report) -> Iterator[str]:
    """Say so where the base model does not do the task."""
    base, chance = place["base"], place.get("chance")
    if chance is not None and clear(base["accuracy"] - chance, reach([base], "accuracy")) < 1:
        yield (
            f"The base model ({base['accuracy']:.1%}) is not clearly better than guessing "
            f"({chance:.1%}): costs of merging and gains of training cannot be interpreted here."
        )


def _others(rows: list[Report]) -> Iterator[tuple[str, str, list[Report]]]:
    """Yield what trained settings are compared with: words for it, its name, the settings' rows.

    These are WT, the rules alone at equal threshold, and every control: first with what is trained
    like it, then with what is trained longer. A training without gain is not compared with
    controls, for it is none by DPO; nor is a control without gain.
    """

    def compared(name: str, **of: object) -> list[Report]:
        return [row for row in rows if name in row["against"] and of.items() <= row.items()]

    for row in rows:
        if row["setting"] == WT:
            own = f"its own rules, TR {row['token_reduction']:.1%}"
            yield f"Training, against WT ({own})", WT, compared(WT)
    yield "Training, against the rules alone at equal threshold", RULES_ALONE, compared(RULES_ALONE)
    for name in (row["setting"] for row in rows if row["kind"] == CONTROL and not row["kept"]):
        for setting, words in _NEXT_TO_CONTROLS.items():
            against = f"{words}, against {name}, which has DPO alone and merges nothing"
            yield against, name, compared(name, setting=setting, kept=False)


def _missing_controls(rows: list[Report]) -> Iterator[str]:
    """Say what a comparison with controls would need."""
    for row in rows:
        if row["kind"] == CONTROL and row["kept"]:
            yield (
                f"Training brought the control {row['setting']} no gain over its start, the base "
                "model: how far it would come by another training is not known."
            )
    if not any(row["kind"] == CONTROL for row in rows):
        yield "No control without merging was run: what training alone would give is not known."
    elif not any(row["setting"] == _BY_PREFERENCE for row in rows):
        yield f"{_BY_PREFERENCE} was not run: no setting is trained by DPO alone, as controls are."


def number_compared(report: Report) -> int:
    """Return how many differences the page calls clear or not: accuracies, margins, others."""
    own = [adaptation_rows(place) for place in report["backbones"]]
    return sum(2 * len(rows) + sum(len(others) for *_, others in _others(rows)) for rows in own)


def adaptation_page(report: Report, figure: str = "adaptation.svg") -> str:
    """Return the page in Markdown."""
    places = [place | {"rows": adaptation_rows(place)} for place in report["backbones"]]
    rows = [row | {"backbone": place["backbone"]} for place in places for row in place["rows"]]
    points = [point for place in places for point in place["points"]]
    names = dict.fromkeys(point["setting"] for point in points)
    known = setting_names()
    shown = {
        "title": _TITLE,
        "file": figure,
        "clearly": CLEARLY,
        "places": [place | {"verdict": verdict(report | place)} for place in places],
        "settings": [find_setting(n) if n in known else {"name": n} for n in names],
        "offsets": [
            place | {"own": own, "kept": kept}
            for place in places
            if (own := _most_rows(place, WT)) > (kept := _most_rows(place, RULES_ALONE))
        ],
        "trainings": _trainings(report),
        "runs": [point for point in points if point.get("steps") is not None],
        "fewer": [
            row | {"label": label(row)}
            for row in rows
            if row["trained"] and row["seeds"] < len(report["seeds"])
        ],
        "compared": number_compared(report),
    }
    return page("adaptation.md", report | shown) + "\n"


def _trainings(report: Report) -> list[Report]:
    """Return each training that was run with its most steps, as the training loop counts them."""
    trainings = {"SFT": report.get("sft"), "DPO": report.get("dpo")}
    trainings |= {f"DPO of {name}": by for name, by in report["control_dpo"].items()}
    questions, described = report["questions"], []
    for name, by in trainings.items():
        if by is not None:
            whole = max(1, by["max_epochs"] * questions["train"] // by["batch_size"])
            steps = {"whole": whole, "steps": min(whole, by["max_steps"])}
            selected = min(questions["valid"], by["validation_rows"])
            described.append(by | steps | {"name": name, "selected": selected})
    return described


def _most_rows(place: Report, setting: str) -> int:
    counts = (p.get("rule_rows", 0) for p in place["points"] if p["setting"] == setting)
    return max(counts, default=0)


def adaptation_svg(report: Report) -> str:
    """Return the figure as an SVG file."""
    places = report["backbones"]
    own = [adaptation_rows(place) for place in places]
    names = list(dict.fromkeys(row["setting"] for rows in own for row in rows))
    panels = []
    for place, rows in zip(places, own, strict=True):
        lines = [_line(index, rows, name) for index, name in enumerate(names)]
        axes = {
            "title": shown_name(place["backbone"]),
            "xlabel": "Token reduction of the context (%)",
            "ylabel": "Accuracy change against the base model\n(points; bars: 95 % intervals)",
        }
        panels.append(Panel([x for x in lines if x.points], axes=axes, levels=[(0.0, None)]))
    return svg_file(chart(panels, height=5.0), f"adaptation-{report['name']}", _TITLE)


def _line(index: int, rows: list[Report], name: str) -> Line:
    """Return a setting's points by rising token reduction, a line where it has thresholds."""
    own = [row for row in rows if row["setting"] == name]
    own.sort(key=lambda row: row["token_reduction"] or 0.0)
    return Line(
        name,
        [(100 * (row["token_reduction"] or 0.0), 100 * row["difference"]) for row in own],
        index,
        [math.nan if row["reach"] is None else 100 * row["reach"] for row in own],
        ["" if row["tau"] is None else f"τ {row['tau']}" for row in own],
        joined=any(row["tau"] is not None for row in own),
    )
