"""Show a finished run where people look: the terminal, Prefect's artifacts, MLflow's files."""

from __future__ import annotations

from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.context import FlowRunContext

from tasks.comparison import HEADINGS, ComparisonRow, comparison_markdown, table_cells
from tasks.pipeline import PipelineRun
from tasks.stage import Artifact


def announce_report(run: PipelineRun, rows: list[ComparisonRow], report: Artifact) -> None:
    """Attach the report to the MLflow run and publish table, text and links as Prefect artifacts.

    Args:
        run: The open pipeline run.
        rows: The comparison.
        report: The report stage's artifact.
    """
    if report.executed:
        run.tracker.attach(run.run_id, [report.path])
    if FlowRunContext.get() is None:
        return
    table = [dict(zip(HEADINGS, table_cells(row), strict=True)) for row in rows]
    create_table_artifact(table, key="umim-comparison", description="Comparison of all cells.")
    create_markdown_artifact(comparison_markdown(rows), key="umim-report")
    create_link_artifact(run.tracker.run_url(run.run_id), link_text="MLflow run", key="umim-mlflow")
