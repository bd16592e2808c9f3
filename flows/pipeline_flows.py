"""Flows of a recipe: the whole pipeline, its parts up to one stage, a table of the paper.

Flow ``umim`` (deployment ``full-pipeline``) ends with the report page. The others stop after the
part that they are named for. ``launch`` starts one from the command line and shows its result.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from prefect import Flow, flow
from prefect.settings import PREFECT_API_URL

from flows import parts
from tasks.report.comparison import (
    comparison,
    comparison_rows,
    record_adaptation,
    record_comparison,
    summary,
)
from tasks.report.render import table_text
from tasks.report.report import ReportData
from tasks.report.scores import score_lines
from tasks.run.pipeline import open_pipeline
from tasks.run.prefect_runs import prefect_must_answer
from tasks.run.recipes import confirmed, find_recipe
from tasks.stages.adaptation import RESULT
from tasks.stages.publish import ablation_stage, ablation_summary, report_stage
from tasks.stages.table import TABLE
from umim_core.adaptation.settings import WT
from umim_core.checkpoint.checkpoint_index import own_checkpoints, own_name
from umim_core.checkpoint.next_steps import after_training
from umim_core.cli.console_output import emit
from umim_core.config.adaptation_recipe import AdaptationRecipe
from umim_core.config.recipe import Recipe
from umim_core.config.recipe_files import AnyRecipe
from umim_core.config.table_recipe import TableRecipe
from umim_core.store.artifacts import read_json

P = ParamSpec("P")
T = TypeVar("T")


@flow(name="umim", flow_run_name="{recipe}")
def full_pipeline(recipe: str = "embedded") -> str:
    """Run a whole recipe: corpus, rules, distillation, adaptation, evaluation, timing, report."""
    with open_pipeline(recipe, "umim", Recipe) as run:
        results = parts.run_everything(run)
        rows = comparison_rows(results, run.recipe.seed)
        record_comparison(run, rows)
        report = run.stage(report_stage(recipe=run.recipe, results=results))
        run.announce(report)
        return str(report.path)


@flow(name="umim-mine", flow_run_name="{recipe}")
def mine(recipe: str = "embedded") -> list[str]:
    """Build corpus, token ids and rules; return the rule directories."""
    with open_pipeline(recipe, "umim-mine", Recipe) as run:
        results = parts.mine(run, parts.prepare(run))
        return [str(result.filtered.path / "rules") for result in results]


@flow(name="umim-distill", flow_run_name="{recipe}")
def distill(recipe: str = "embedded") -> list[str]:
    """Mine rules and distil; return the checkpoint directories."""
    with open_pipeline(recipe, "umim-distill", Recipe) as run:
        _, results = parts.train(run)
        return [str(result.settings[WT].path / "checkpoint") for result in results]


@flow(name="umim-adapt", flow_run_name="{recipe}")
def adapt(recipe: str = "embedded") -> list[dict[str, str]]:
    """Adapt to a task.

    Returns:
        Checkpoint directories by setting, of each cell; or the folder of the curves' result.
    """
    if isinstance(find_recipe(recipe), AdaptationRecipe):
        with open_pipeline(recipe, "umim-adapt", AdaptationRecipe) as curves:
            adaptation = parts.measure_adaptation(curves)
            record_adaptation(curves, adaptation)
            curves.announce(adaptation)
            return [{RESULT: str(adaptation.path)}]
    with open_pipeline(recipe, "umim-adapt", Recipe) as run:
        sources, results = parts.train(run)
        run.run_parallel(parts.adaptations(run, sources, results))
        return [
            {name: str(artifact.path / "checkpoint") for name, artifact in result.settings.items()}
            for result in results
        ]


@flow(name="umim-evaluate", flow_run_name="{recipe}")
def evaluate(recipe: str = "embedded") -> str:
    """Train what is missing and evaluate it; return the comparison table."""
    with open_pipeline(recipe, "umim-evaluate", Recipe) as run:
        sources, results = parts.train(run)
        run.run_parallel(parts.adaptations(run, sources, results))
        parts.evaluate(run, sources, results)
        rows = comparison_rows(results, run.recipe.seed)
        record_comparison(run, rows)
        return table_text(comparison(rows, run.recipe.model_dump(mode="json")))


@flow(name="umim-benchmark", flow_run_name="{recipe}")
def benchmark(recipe: str = "embedded") -> list[dict[str, float]]:
    """Train what is missing and time it; return the metrics of every cell."""
    with open_pipeline(recipe, "umim-benchmark", Recipe) as run:
        _, results = parts.train(run)
        parts.benchmark(run, results)
        return [result.benchmark.metrics for result in results if result.benchmark is not None]


@flow(name="umim-ablate", flow_run_name="{recipe}")
def ablate(recipe: str = "ablation-thresholds") -> str:
    """Mine, distil and evaluate every cell; return the table and where its files are."""
    with open_pipeline(recipe, "umim-ablate", Recipe) as run:
        sources, results = parts.train(run)
        parts.evaluate(run, sources, results)
        record_comparison(run, comparison_rows(results, run.recipe.seed))
        name = run.recipe.name
        ablation = run.stage(ablation_stage(recipe=run.recipe, results=results), label=name)
        run.announce(ablation)
        return ablation_summary(ablation, name)


@flow(name="umim-table", flow_run_name="{recipe}")
def table(
    recipe: str = "tables/multiple-choice-smollm2", confirm_run_unsafe_code: bool = False
) -> str:
    """Measure one table of the paper."""
    with open_pipeline(recipe, "umim-table", TableRecipe) as run:
        if confirm_run_unsafe_code:
            run.recipe = confirmed(run.recipe)
        return str(parts.measure_table(run).path / TABLE)


def _called(flow: Flow[P, T]) -> Callable[P, T]:
    """Return a flow, or its function alone where no Prefect server is named: none is started."""
    return prefect_must_answer()(flow) if PREFECT_API_URL.value() else flow.fn


def launch(
    recipe: str, loaded: AnyRecipe, part: str, confirm_run_unsafe_code: bool, as_json: bool
) -> None:
    if isinstance(loaded, TableRecipe):
        measured = _called(table)(recipe, confirm_run_unsafe_code)
        content: Any = read_json(Path(measured))
        emit({"path": measured, "table": content}, [*score_lines(content), measured], as_json)
        return
    if isinstance(loaded, AdaptationRecipe):
        (folders,) = _called(adapt)(recipe)
        path = Path(folders[RESULT])
        page = (path / f"{RESULT}.md").read_text(encoding="utf-8")
        emit({"path": str(path)}, [page, str(path)], as_json)
        return
    if part != "full":
        named: dict[str, Flow[..., Any]] = {"mine": mine, "distill": distill, "adapt": adapt}
        named |= {"evaluate": evaluate, "benchmark": benchmark, "ablate": ablate}
        result = _called(named[part])(recipe)
        shown = result if isinstance(result, str) else json.dumps(result, indent=1)
        emit(
            {"flow": part, "result": result},
            [shown.rstrip(), *_checkpoint_lines(loaded.name)],
            as_json,
        )
        return
    began = time.monotonic()
    path = Path(_called(full_pipeline)(recipe))
    data = ReportData.model_validate_json((path / "report.json").read_text(encoding="utf-8"))
    lines = [
        table_text(summary(data.rows, data.config)).rstrip(),
        "",
        f"report: {path / 'report.html'}",
        f"{time.monotonic() - began:.0f} s",
        *_checkpoint_lines(loaded.name),
    ]
    emit(data.model_dump(mode="json") | {"path": str(path)}, lines, as_json)


def _checkpoint_lines(recipe: str) -> list[str]:
    """Return the names of what the recipe trained, and how to use the first."""
    prefix = own_name(recipe) + "/"
    names = [name for name in own_checkpoints() if name.startswith(prefix)]
    if not names:
        return []
    return ["", "checkpoints:", *(f"  {name}" for name in names), "", *after_training(names[0])]
