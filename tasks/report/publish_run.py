"""Announcement of a finished run: the terminal, Prefect's artifacts, MLflow's files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.context import FlowRunContext

from tasks.report.ablation import ablation_page, read_ablation
from tasks.report.compare import short_name
from tasks.report.comparison import ComparisonRow, comparison
from tasks.report.render import table_markdown
from tasks.run.pipeline import PipelineRun
from tasks.run.prefect_runs import prefect_may_be_away
from tasks.run.stage import Artifact
from tasks.tracking.compare_view import ADAPTATION_SOURCE
from umim_core.adaptation.settings import BASE
from umim_core.config.adaptation_recipe import AdaptationRecipe
from umim_core.store.artifacts import canonical_json, read_json, sha256_bytes

_OF_A_POINT: Final = (
    *("rules", "token_reduction", "input_reduction", "accuracy", "accuracy_se", "difference"),
    *("difference_se", "gained", "lost", "margin", "margin_difference", "margin_difference_se"),
)


def announce_report(run: PipelineRun, rows: list[ComparisonRow], report: Artifact) -> None:
    """Attach the report to the MLflow run and publish table, text and links in Prefect."""
    run.tracker.attach(run.key, [report.path], replace=report.executed)
    if FlowRunContext.get() is None:
        return
    with prefect_may_be_away():
        table = comparison(rows, run.recipe.model_dump(mode="json"))
        cells = [dict(zip(table.headings, row, strict=True)) for row in table.rows]
        create_table_artifact(cells, key="umim-comparison", description="Comparison of all cells.")
        create_markdown_artifact(table_markdown(table), key="umim-report")
        _link_mlflow(run)


def _link_mlflow(run: PipelineRun) -> None:
    pages = run.pages()
    if pages is not None and pages.command is None:
        create_link_artifact(pages.compare, link_text="MLflow comparison", key="umim-mlflow")
    elif pages is not None:
        shown = f"`{pages.command}`, then [the comparison]({pages.compare})"
        create_markdown_artifact(shown, key="umim-mlflow")


def announce_ablation(run: PipelineRun, ablation: Artifact) -> None:
    """Attach an ablation to the MLflow run and publish its page as a Prefect artifact."""
    run.tracker.attach(run.key, [ablation.path], replace=ablation.executed)
    if FlowRunContext.get() is not None:
        with prefect_may_be_away():
            create_markdown_artifact(ablation_page(read_ablation(ablation)), key="umim-ablation")


def announce_adaptation(run: PipelineRun[AdaptationRecipe], adaptation: Artifact) -> None:
    """Write every point of the curves as a row of its own, keep their files, publish their page."""
    run.tracker.attach(run.key, [adaptation.path], replace=adaptation.executed)
    result = adaptation.path / adaptation.stage
    for params, metrics in adaptation_points(read_json(result.with_suffix(".json"))):
        tau = "" if params["tau"] is None else f" τ {params['tau']}"
        key = sha256_bytes(canonical_json([run.key, params, metrics]).encode())
        name = f"{params['setting']}{tau} {params['model']}"
        run.tracker.comparison_run(run.key, key, name, params, metrics, source=ADAPTATION_SOURCE)
    if FlowRunContext.get() is not None:
        with prefect_may_be_away():
            lines = result.with_suffix(".md").read_text(encoding="utf-8").splitlines(keepends=True)
            page = "".join(line for line in lines if not line.startswith("!["))  # a figure of files
            create_markdown_artifact(page, key="umim-adaptation")
            _link_mlflow(run)


def adaptation_points(body: Any) -> Iterator[tuple[dict[str, object], dict[str, float | None]]]:
    """Yield parameters and metrics of every model of the curves, the base models first."""
    for place in body["backbones"]:
        shared = {
            "task": body["task"],
            "model": short_name(place["backbone"]),
            "checkpoint": place["checkpoint"],
        }
        for point in ({"setting": BASE, **place["base"]}, *place["points"]):
            own = {name: point.get(name) for name in ("setting", "tau", "seed")}
            yield shared | own, {name: point.get(name) for name in _OF_A_POINT}
