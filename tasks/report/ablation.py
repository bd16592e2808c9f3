"""Table, page and figures of an ablation, made of its data alone.

Its file has a cell's ``row`` of the comparison, ``rules`` by order, ``training`` (steps, the step
kept, seconds), ``further`` figures, and ``withdrawn``, the metrics that no longer stand.

A figure has a panel per backbone, a line per variant (what differs between the cells besides
backbone and threshold), and a labelled point per threshold.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tasks.report.charts import Line, Panel, chart, svg_file
from tasks.report.comparison import STATES, ComparisonRow, shown_name, variants
from tasks.report.render import (
    DASH,
    Report,
    Table,
    environment,
    escaped,
    file_table,
    formatted,
    page,
    table_markdown,
    table_text,
)
from tasks.run.recipes import recipe_names

_CLOSER: Final = "is better. Points are labelled with their threshold τ."
FIGURES: Final = {  # by the metric against token reduction
    "top1": {
        "title": "Top-1 agreement against token reduction",
        "axis": "Top-1 agreement with the base model",
        "caption": f"Further up and to the right {_CLOSER}",
    },
    "kl": {
        "title": "KL divergence against token reduction",
        "axis": "KL from the base model (nats per row)",
        "caption": f"Further down and to the right {_CLOSER}",
    },
}


def _rows(data: Report) -> list[ComparisonRow]:
    return [ComparisonRow.model_validate(cell["row"]) for cell in data["cells"]]


def ablation_table(data: Report) -> Table:
    rows = _rows(data)
    cells = [cell | {"row": row} for cell, row in zip(data["cells"], rows, strict=True)]
    return file_table("ablation.txt", cells, variants=variants(rows))


def _noted(data: Report) -> Report:
    """Return what the note under the table shows."""
    budget = data["budget"]
    taken = [int(cell["training"].get("steps", budget["steps"])) for cell in data["cells"]]
    return data | {
        "states": STATES,
        "by_states": any(row.metric("top1_states") is not None for row in _rows(data)),
        "early": [steps for steps in taken if steps < budget["steps"]],
        "withdrawn": any(cell.get("withdrawn") for cell in data["cells"]),
    }


def ablation_text(data: Report) -> str:
    """Return the table for a terminal, with its note."""
    note = environment().get_template("ablation_note.txt").render(_noted(data))
    return table_text(replace(ablation_table(data), note=" ".join(note.split())))


def ablation_page(data: Report) -> str:
    """Return the page in Markdown; the figures lie next to it."""
    asked = data["evaluation"]
    shown = {
        "description": escaped(data["description"].strip()),
        "table": table_markdown(ablation_table(data)),
        "figures": FIGURES,
        "held_out": {  # a short text has fewer than are asked for
            name: f"{min(row.metric(name) or asked[name] for row in _rows(data)):.0f}"
            for name in asked
        },
        "trained_on": list(dict.fromkeys(filter(None, (x["trained_on"] for x in data["cells"])))),
        "shipped": data["name"] in recipe_names(),
    }
    return page("ablation.md", _noted(data) | shown) + "\n"


def figure_svg(data: Report, metric: str) -> str:
    figure, differing = FIGURES[metric], variants(_rows(data))
    own: dict[str, dict[str, list[tuple[float, float, str]]]] = {}
    for row in _rows(data):
        values = {heading: getattr(row, field) for heading, field in differing.items()}
        name = ", ".join(
            f"{heading} {formatted(value, '' if isinstance(value, str) else ',.0f')}"
            for heading, value in values.items()
        )
        points = own.setdefault(row.backbone, {}).setdefault(name, [])
        x, y = row.metric("token_reduction"), row.metric(metric)
        if x is not None and y is not None:
            points.append((100 * x, y, DASH if row.tau is None else f"τ {row.tau}"))
    names = list(dict.fromkeys(name for lines in own.values() for name in lines))
    panels = []
    for backbone, lines in own.items():
        axes = {"title": shown_name(backbone), "ylabel": figure["axis"]}
        axes["xlabel"] = "Token reduction on held-out text (%)"
        drawn = []
        for index, name in enumerate(names):
            if found := sorted(lines.get(name, [])):
                places, texts = [(x, y) for x, y, _ in found], [text for _, _, text in found]
                drawn.append(Line(name, places, index, texts=texts))
        panels.append(Panel(drawn, axes=axes))
    return svg_file(chart(panels), f"{data['name']}-{metric}", figure["title"])
