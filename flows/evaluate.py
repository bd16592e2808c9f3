"""Flow ``umim-evaluate``: alignment, perplexity and task accuracy of every cell and setting."""

from __future__ import annotations

from prefect import flow

from flows import parts
from tasks.report.compare import comparison_rows, record_comparison
from tasks.report.comparison_table import comparison
from tasks.report.tables import table_text
from tasks.run.pipeline import open_pipeline


@flow(name="umim-evaluate", flow_run_name="{recipe}")
def evaluate(recipe: str = "embedded") -> str:
    """Train what is missing and evaluate it; return the comparison table."""
    with open_pipeline(recipe, "umim-evaluate") as run:
        sources = parts.prepare(run)
        results = parts.mine(run, sources)
        parts.distill(run, results)
        run.run_parallel(parts.adaptations(run, sources, results))
        parts.evaluate(run, sources, results)
        rows = comparison_rows(results, [], run.recipe.seed)
        record_comparison(run, rows)
        return table_text(comparison(rows, run.recipe.model_dump(mode="json")))
