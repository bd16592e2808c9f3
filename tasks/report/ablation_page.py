"""The page of an ablation: its table, its figures' names and what they mean; made of data alone.

Nothing here draws, so the page can be made without the drawing library.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from tasks.report.ablation_data import AblationData
from tasks.report.comparison import ComparisonRow
from tasks.report.comparison_table import STATES, TAU, metric_column, variant_columns
from tasks.report.row_labels import shown_name
from tasks.report.tables import DASH, Column, Table, escaped, make_table, table_markdown
from tasks.run.recipes import recipe_names

_METRICS: Final = (
    metric_column("TR %", "token_reduction", 1, 100),
    metric_column("rules", "rules", 0),
    metric_column("Top-1", "top1", 4),
    metric_column("Top-3", "top3", 4),
    metric_column("Top-10", "top10", 4),
    metric_column("Top-p", "topp", 4),
    metric_column("MRR", "mrr", 4),
    metric_column("KL", "kl", 3),
    metric_column("Top-1 states", "top1_states", 4),
    metric_column("KL states", "kl_states", 3),
    metric_column("PPL base", "ppl_base", 2),
)


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
    rows = data.rows
    columns = (
        Column("backbone", lambda row: shown_name(row.cell.backbone), left=True),
        TAU,
        *variant_columns(rows),
        *_METRICS,
        _perplexity([cell.row for cell in data.cells if "ppl_umim" in cell.withdrawn]),
    )
    return make_table("", columns, rows, " ".join(_note(data)))


def _perplexity(withdrawn: Sequence[ComparisonRow]) -> Column:
    """Return the column of UMIM's perplexity, withdrawn figures with a dagger."""
    plain = metric_column("PPL UMIM", "ppl_umim", 2)
    return Column(plain.heading, lambda row: plain.show(row) + " †" * (row in withdrawn))


def _note(data: AblationData) -> Iterator[str]:
    """Yield the sentences below the table."""
    yield _budget(data)
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


def _budget(data: AblationData) -> str:
    """Return in words what every cell was trained on, and which cells stopped earlier."""
    budget = data.budget
    text = (
        f"Budget of every cell: {budget.steps:,} steps of {budget.rows} rows of "
        f"{budget.tokens:,} tokens ({budget.total:,} tokens), seed {data.seed}."
    )
    early = [cell for cell in data.cells if cell.steps is not None and cell.steps < budget.steps]
    if not early:
        return text
    fewest = min(cell.steps or 0 for cell in early)
    return f"{text} {len(early)} of {len(data.cells)} cells stopped earlier, at least {fewest}."


def _again(name: str) -> str:
    """Return what measures an ablation again; only a shipped recipe is found by its name."""
    if name in recipe_names():
        return f"`python -m flows run {name} --flow ablate` measures it again."
    return (
        f"Its recipe is not among the shipped ones: it is `recipe` in that file, and {name}.yaml "
        f"if that lies next to it; `python -m flows run {name}.yaml --flow ablate` measures it "
        "again."
    )


def ablation_page(data: AblationData) -> str:
    """Return the page in markdown; the figures lie next to it."""
    table = ablation_table(data)
    machine = ", ".join(f"{name} {value}" for name, value in data.machine.items())
    versions = ", ".join(f"{name} {value}" for name, value in data.versions.items())
    platforms = dict.fromkeys(cell.trained_on for cell in data.cells if cell.trained_on)
    trained_on = " and ".join(platforms) or DASH
    held_out = ", ".join(
        f"{count} {name.replace('_rows', '')}" for name, count in data.evaluation.items()
    )
    parts = [
        f"# Ablation: {data.name}",
        escaped(data.description.strip()),
        table_markdown(table),
        *(
            f"![{figure.title}]({data.name}-{name}.svg)\n\n{figure.caption}"
            for name, figure in FIGURES.items()
        ),
        f"Held-out rows of {data.budget.tokens:,} tokens: {held_out}." if held_out else "",
        f"Table made on: {machine}. Trained on: {trained_on}. {versions}.",
        f"Source: {data.name}.json, which holds the recipe and everything measured; this page "
        "and its figures are made of it by `python -m docs.make`. " + _again(data.name),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"
