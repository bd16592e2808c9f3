"""Table, page and figures of an ablation, made of its data alone.

Its file has a cell's ``row`` of the comparison, ``rules`` by order, ``training`` (steps, the step
kept, seconds), ``further`` figures, and ``withdrawn``, the metrics that no longer stand.

A figure has a panel per backbone, a line per variant (what differs between the cells besides
backbone and threshold), and a labelled point per threshold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from matplotlib.figure import Figure

from tasks.report.charts import Line, Panel, chart, svg_file
from tasks.report.comparison import STATES, ComparisonRow, shown_name, variants
from tasks.report.render import (
    DASH,
    Report,
    Table,
    escaped,
    file_table,
    formatted,
    page,
    table_markdown,
)
from tasks.run.recipes import recipe_names
from tasks.run.stage import Artifact
from umim_core.store.artifacts import read_json


def read_ablation(artifact: Artifact) -> Report:
    name = str(artifact.manifest()["config"]["recipe"]["name"])
    data: Any = read_json(artifact.path / f"{name}.json")
    return data


def _rows(data: Report) -> list[ComparisonRow]:
    return [ComparisonRow.model_validate(cell["row"]) for cell in data["cells"]]


class AblationFigure(NamedTuple):
    title: str
    axis: str  # label of the metric's
    caption: str


FIGURES: Final = {  # by the metric against token reduction
    "top1": AblationFigure(
        "Top-1 agreement against token reduction",
        "Top-1 agreement with the base model",
        "Further up and to the right is better. Points are labelled with their threshold τ.",
    ),
    "kl": AblationFigure(
        "KL divergence against token reduction",
        "KL from the base model (nats per row)",
        "Further down and to the right is better. Points are labelled with their threshold τ.",
    ),
}


def ablation_table(data: Report) -> Table:
    rows = _rows(data)
    cells = [cell | {"row": row} for cell, row in zip(data["cells"], rows, strict=True)]
    table = file_table("ablation.txt", cells, variants=variants(rows))
    return replace(table, note=" ".join(_note(data, rows)))


def _note(data: Report, rows: Sequence[ComparisonRow]) -> Iterator[str]:
    steps, batch, tokens = (data["budget"][name] for name in ("steps", "rows", "tokens"))
    yield (
        f"Budget of every cell: {steps:,} steps of {batch} rows of {tokens:,} tokens "
        f"({steps * batch * tokens:,} tokens), seed {data['seed']}."
    )
    taken = [int(cell["training"].get("steps", steps)) for cell in data["cells"]]
    early = [fewer for fewer in taken if fewer < steps]
    if early:
        yield f"{len(early)} of {len(taken)} cells stopped earlier, at least {min(early)}."
    yield (
        "TR: tokens removed by merging, realised. Top-1 to KL: on held-out rows, at unit ends from "
        "the first merge on, where both paths predict what follows the same raw token; KL in nats, "
        "lower is better, the others 0 to 1, higher is better; Top-p with p = 0.9."
    )
    if any(row.metric("top1_states") is not None for row in rows):
        yield f"Unit ends are rows {STATES}"
    else:
        yield (
            "Which rows are unit ends depends on the rules: cells with other rules are not "
            "compared row by row."
        )
    yield "PPL: per raw token, every token scored."
    if any(cell.get("withdrawn") for cell in data["cells"]):
        yield (
            "†: withdrawn. The accounting it was measured with is no likelihood where one rule "
            "lies inside another: it chose the state before a token by looking at the token, its "
            "probabilities add up to more than 1, and the figure is too low. No cell of these can "
            "be compared with others by its perplexity."
        )


def ablation_page(data: Report) -> str:
    """Return the page in Markdown; the figures lie next to it."""
    shown = {
        "description": escaped(data["description"].strip()),
        "table": table_markdown(ablation_table(data)),
        "figures": FIGURES,
        "held_out": data["evaluation"],
        "trained_on": list(dict.fromkeys(filter(None, (x["trained_on"] for x in data["cells"])))),
        "shipped": data["name"] in recipe_names(),
    }
    return page("ablation.md", data | shown) + "\n"


def figure_svg(data: Report, name: str) -> str:
    return svg_file(_draw(_rows(data), name), f"{data['name']}-{name}", FIGURES[name].title)


def _draw(rows: Sequence[ComparisonRow], metric: str) -> Figure:
    differing = variants(rows)
    own: dict[str, dict[str, list[tuple[float, float, str]]]] = {}
    for row in rows:
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
        axes = {"title": shown_name(backbone), "ylabel": FIGURES[metric].axis}
        axes["xlabel"] = "Token reduction on held-out text (%)"
        drawn = []
        for index, name in enumerate(names):
            if found := sorted(lines.get(name, [])):
                points = [(x, y) for x, y, _ in found]
                drawn.append(Line(name, points, index, texts=[text for _, _, text in found]))
        panels.append(Panel(drawn, axes=axes))
    return chart(panels)
