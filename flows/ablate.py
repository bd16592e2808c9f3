"""Flow ``umim-ablate``: one comparison row per cell of a recipe, without adaptation or timing."""

from __future__ import annotations

from prefect import flow

from flows import parts
from tasks.report.compare import comparison_rows, record_comparison
from tasks.report.publish_run import announce_ablation
from tasks.run.pipeline import open_pipeline
from tasks.stages.publish import ablation_stage, ablation_summary


@flow(name="umim-ablate", flow_run_name="{recipe}")
def ablate(recipe: str = "ablation-thresholds") -> str:
    """Mine, distil and evaluate every cell; return the table and where its files are."""
    with open_pipeline(recipe, "umim-ablate") as run:
        sources = parts.prepare(run)
        results = parts.mine(run, sources)
        parts.distill(run, results)
        parts.evaluate(run, sources, results)
        record_comparison(run, comparison_rows(results, [], run.recipe.seed))
        ablation = run.stage(ablation_stage, run.recipe, results, label=run.recipe.name)
        announce_ablation(run, ablation)
        return ablation_summary(ablation)
