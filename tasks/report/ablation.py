"""Table, page and figures of an ablation, made of its data alone.

A figure has a panel per backbone, a line per variant (what differs between the cells besides
backbone and threshold), and a labelled point per threshold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, Literal, NamedTuple

from matplotlib.figure import Figure
from pydantic import BaseModel, ConfigDict, Field

from tasks.report.charts import Line, Panel, chart, svg_file
from tasks.report.comparison import STATES, ComparisonRow, shown_name, variants
from tasks.report.render import DASH, Table, escaped, file_table, formatted, page, table_markdown
from tasks.run.recipes import recipe_names
from tasks.run.stage import Artifact


class Part(BaseModel):
    """A part of a result file: frozen, and without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Budget(Part):
    """Training budget of every cell."""

    steps: int = Field(ge=1)  # of the optimiser, at most
    rows: int = Field(ge=1)  # of the global batch
    tokens: int = Field(ge=1)  # raw, of a row

    @property
    def total(self) -> int:
        """Raw tokens that a cell sees if it takes every step."""
        return self.steps * self.rows * self.tokens


class AblationCell(Part):
    """One cell: what it was, what it was trained with, what was measured."""

    row: ComparisonRow  # with the metrics that the table shows
    rules: dict[int, int]  # number by order
    # Share of rules that share a surrogate with another in a module without positions, 0..1.
    collision_rate: float | None = None
    training: dict[str, float] = Field(default_factory=dict)  # steps, the step kept, seconds
    trained_on: str = ""  # platform
    further: dict[str, float] = Field(default_factory=dict)  # everything else that was measured
    withdrawn: tuple[str, ...] = ()  # metrics that no longer stand; the page marks them

    @property
    def steps(self) -> int | None:
        """Steps taken; None where they were not recorded."""
        return int(self.training["steps"]) if "steps" in self.training else None


class AblationData(Part):
    kind: Literal["ablation"] = "ablation"  # tells the file apart from other results
    name: str  # of the recipe; files next to it begin with it
    description: str = ""
    seed: int
    budget: Budget
    evaluation: dict[str, int] = Field(default_factory=dict)  # held-out rows of the measurements
    recipe: dict[str, object] = Field(default_factory=dict)
    machine: dict[str, str] = Field(default_factory=dict)  # that made the table
    versions: dict[str, str] = Field(default_factory=dict)  # all where the cells differ
    cells: tuple[AblationCell, ...] = Field(min_length=1)

    @property
    def rows(self) -> tuple[ComparisonRow, ...]:
        return tuple(cell.row for cell in self.cells)


def read_ablation(artifact: Artifact) -> AblationData:
    name = str(artifact.manifest()["config"]["recipe"]["name"])
    return AblationData.model_validate_json((artifact.path / f"{name}.json").read_text("utf-8"))


class AblationFigure(NamedTuple):
    """One figure: its title in plain words, the label of the metric's axis, how to read it."""

    title: str
    axis: str
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


def ablation_table(data: AblationData) -> Table:
    """Return the cells under what differs between them and what was measured."""
    table = file_table("ablation.txt", data.cells, variants=variants(data.rows))
    return replace(table, note=" ".join(_note(data)))


def _note(data: AblationData) -> Iterator[str]:
    """Yield the sentences below the table."""
    budget = data.budget
    yield (
        f"Budget of every cell: {budget.steps:,} steps of {budget.rows} rows of "
        f"{budget.tokens:,} tokens ({budget.total:,} tokens), seed {data.seed}."
    )
    early = [cell.steps for cell in data.cells if (cell.steps or budget.steps) < budget.steps]
    if early:
        fewest = min(steps for steps in early if steps is not None)
        yield f"{len(early)} of {len(data.cells)} cells stopped earlier, at least {fewest}."
    yield (
        "TR: tokens removed by merging, realised. Top-1 to KL: on held-out rows, at unit ends from "
        "the first merge on, where both paths predict what follows the same raw token; KL in nats, "
        "lower is better, the others 0 to 1, higher is better; Top-p with p = 0.9."
    )
    if any(row.metric("top1_states") is not None for row in data.rows):
        yield f"Unit ends are rows {STATES}"
    else:
        yield (
            "Which rows are unit ends depends on the rules: cells with other rules are not "
            "compared row by row."
        )
    yield "PPL: per raw token, every token scored."
    if any(cell.withdrawn for cell in data.cells):
        yield (
            "†: withdrawn. The accounting it was measured with is no likelihood where one rule "
            "lies inside another: it chose the state before a token by looking at the token, its "
            "probabilities add up to more than 1, and the figure is too low. No cell of these can "
            "be compared with others by its perplexity."
        )


def ablation_page(data: AblationData) -> str:
    """Return the page in Markdown; the figures lie next to it."""
    shown = {
        "description": escaped(data.description.strip()),
        "table": table_markdown(ablation_table(data)),
        "figures": FIGURES,
        "held_out": data.evaluation,
        "trained_on": list(dict.fromkeys(x.trained_on for x in data.cells if x.trained_on)),
        "shipped": data.name in recipe_names(),
    }
    return page("ablation.md", dict(data) | shown) + "\n"


def figure_svg(data: AblationData, name: str) -> str:
    return svg_file(_draw(data.rows, name), f"{data.name}-{name}", FIGURES[name].title)


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
        drawn = [
            Line(
                name,
                [(x, y) for x, y, _ in sorted(lines[name])],
                names.index(name),
                texts=[text for _, _, text in sorted(lines[name])],
            )
            for name in names
            if lines.get(name)
        ]
        panels.append(Panel(drawn, axes=axes))
    return chart(panels)
