"""Announcement of a finished run: the terminal, Prefect's artifacts, MLflow's files."""

from __future__ import annotations

from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.context import FlowRunContext

from tasks.report.ablation_data import read_ablation
from tasks.report.ablation_page import ablation_page
from tasks.report.comparison import ComparisonRow
from tasks.report.comparison_table import comparison
from tasks.report.tables import table_markdown
from tasks.run.pipeline import PipelineRun
from tasks.run.prefect_runs import prefect_may_be_away
from tasks.run.stage import Artifact


def announce_report(run: PipelineRun, rows: list[ComparisonRow], report: Artifact) -> None:
    """Attach the report to the MLflow run and publish table, text and links as Prefect artifacts.

    Args:
        run: The open pipeline run.
        rows: The comparison.
        report: The report stage's artifact.
    """
    if report.executed:
        run.tracker.attach(run.key, [report.path])
    if FlowRunContext.get() is None:
        return
    with prefect_may_be_away():
        table = comparison(rows, run.recipe.model_dump(mode="json"))
        cells = [dict(zip(table.headings, row, strict=True)) for row in table.rows]
        create_table_artifact(cells, key="umim-comparison", description="Comparison of all cells.")
        create_markdown_artifact(table_markdown(table), key="umim-report")
        _link_mlflow(run)


def _link_mlflow(run: PipelineRun) -> None:
    pages = run.tracker.pages(run.key)
    if pages is not None and pages.command is None:
        create_link_artifact(pages.compare, link_text="MLflow comparison", key="umim-mlflow")
    elif pages is not None:
        shown = f"`{pages.command}`, then [the comparison]({pages.compare})"
        create_markdown_artifact(shown, key="umim-mlflow")


def announce_ablation(run: PipelineRun, ablation: Artifact) -> None:
    """Attach an ablation to the MLflow run and publish its page as a Prefect artifact.

    Args:
        run: The open pipeline run.
        ablation: The ablation stage's artifact.
    """
    if ablation.executed:
        run.tracker.attach(run.key, [ablation.path])
    if FlowRunContext.get() is not None:
        with prefect_may_be_away():
            create_markdown_artifact(ablation_page(read_ablation(ablation)), key="umim-ablation")
