"""Page and figure of a task adaptation, made of ``adaptation.json`` alone.

The figure has a panel per backbone: change of accuracy against token reduction, a line per setting
through its thresholds. Error bars are the 95 % intervals that make a change clear; what has no
known error has no bar.
"""

from __future__ import annotations

import math
from typing import Final

from tasks.paper.adaptation_rows import CLEARLY, RULES_ALONE, adaptation_rows, label
from tasks.paper.adaptation_verdict import number_compared, verdict
from tasks.report.charts import Line, Panel, chart, svg_file
from tasks.report.render import Report, page
from tasks.report.row_labels import shown_name
from umim_core.adaptation.settings import WT, find_setting, setting_names

_TITLE: Final = "Accuracy change against token reduction"


def adaptation_page(report: Report, figure: str = "adaptation.svg") -> str:
    """Return the page in Markdown.

    Raises:
        jinja2.UndefinedError: If the content lacks a field that the page shows.
    """
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
