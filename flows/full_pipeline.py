"""Flow ``umim``, deployment ``full-pipeline``: from a corpus to the report page."""

from __future__ import annotations

from prefect import flow

from flows import parts
from tasks.report.compare import comparison_rows, record_comparison
from tasks.report.publish_run import announce_report
from tasks.run.pipeline import open_pipeline
from tasks.stages.publish import report_stage


@flow(name="umim", flow_run_name="{recipe}")
def full_pipeline(recipe: str = "embedded") -> str:
    """Run a whole recipe: corpus, rules, distillation, adaptation, evaluation, timing, report."""
    with open_pipeline(recipe, "umim") as run:
        results, shipped = parts.run_everything(run)
        rows = comparison_rows(results, shipped, run.recipe.seed)
        record_comparison(run, rows)
        report = run.stage(report_stage, run.recipe, results, shipped, run.links(), run.lease)
        announce_report(run, rows, report)
        return str(report.path)
