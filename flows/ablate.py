"""Flow ``umim-ablate``: one comparison row per cell of a recipe, without adaptation or timing."""

from __future__ import annotations

from prefect import flow

from flows import parts
from tasks.compare import comparison_rows, record_comparison
from tasks.comparison import comparison_table
from tasks.pipeline import open_pipeline


@flow(name="umim-ablate")
def ablate(recipe: str = "ablation-thresholds") -> str:
    """Mine, distil and evaluate every cell; return the comparison table."""
    with open_pipeline(recipe, "umim-ablate") as run:
        sources = parts.prepare(run)
        results = parts.mine(run, sources)
        parts.distill(run, results)
        parts.evaluate(run, sources, results)
        rows = comparison_rows(results, [], run.recipe.seed)
        record_comparison(run, rows)
        return comparison_table(rows)
