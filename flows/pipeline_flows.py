"""Flows of a recipe: the whole pipeline, its parts up to one stage, a table of the paper.

Flow ``umim`` (deployment ``full-pipeline``) ends with the report page. The others stop after the
part that they are named for.
"""

from __future__ import annotations

from prefect import flow

from flows import parts
from flows.adaptation_curves import measure_adaptation
from tasks.report.compare import comparison_rows, record_adaptation, record_comparison
from tasks.report.comparison import comparison
from tasks.report.render import table_markdown, table_text
from tasks.run.pipeline import open_pipeline
from tasks.run.recipes import confirmed, find_recipe
from tasks.stages.adaptation import RESULT
from tasks.stages.publish import ablation_stage, ablation_summary, report_stage
from tasks.stages.table import TABLE
from umim_core.adaptation.settings import WT
from umim_core.config.adaptation_recipe import AdaptationRecipe
from umim_core.config.table_recipe import TableRecipe


@flow(name="umim", flow_run_name="{recipe}")
def full_pipeline(recipe: str = "embedded") -> str:
    """Run a whole recipe: corpus, rules, distillation, adaptation, evaluation, timing, report."""
    with open_pipeline(recipe, "umim") as run:
        results = parts.run_everything(run)
        rows = comparison_rows(results, run.recipe.seed)
        record_comparison(run, rows)
        report = run.stage(report_stage(recipe=run.recipe, results=results))
        compared = comparison(rows, run.recipe.model_dump(mode="json"))
        run.announce(report, table_markdown(compared))
        return str(report.path)


@flow(name="umim-mine", flow_run_name="{recipe}")
def mine(recipe: str = "embedded") -> list[str]:
    """Build corpus, token ids and rules; return the rule directories."""
    with open_pipeline(recipe, "umim-mine") as run:
        results = parts.mine(run, parts.prepare(run))
        return [str(result.filtered.path / "rules") for result in results]


@flow(name="umim-distill", flow_run_name="{recipe}")
def distill(recipe: str = "embedded") -> list[str]:
    """Mine rules and distil; return the checkpoint directories."""
    with open_pipeline(recipe, "umim-distill") as run:
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
            adaptation = measure_adaptation(curves)
            record_adaptation(curves, adaptation)
            page = (adaptation.path / f"{RESULT}.md").read_text(encoding="utf-8")
            curves.announce(adaptation, page)
            return [{RESULT: str(adaptation.path)}]
    with open_pipeline(recipe, "umim-adapt") as run:
        sources, results = parts.train(run)
        run.run_parallel(parts.adaptations(run, sources, results))
        return [
            {name: str(artifact.path / "checkpoint") for name, artifact in result.settings.items()}
            for result in results
        ]


@flow(name="umim-evaluate", flow_run_name="{recipe}")
def evaluate(recipe: str = "embedded") -> str:
    """Train what is missing and evaluate it; return the comparison table."""
    with open_pipeline(recipe, "umim-evaluate") as run:
        sources, results = parts.train(run)
        run.run_parallel(parts.adaptations(run, sources, results))
        parts.evaluate(run, sources, results)
        rows = comparison_rows(results, run.recipe.seed)
        record_comparison(run, rows)
        return table_text(comparison(rows, run.recipe.model_dump(mode="json")))


@flow(name="umim-benchmark", flow_run_name="{recipe}")
def benchmark(recipe: str = "embedded") -> list[dict[str, float]]:
    """Train what is missing and time it; return the metrics of every cell."""
    with open_pipeline(recipe, "umim-benchmark") as run:
        _, results = parts.train(run)
        parts.benchmark(run, results)
        return [result.benchmark.metrics for result in results if result.benchmark is not None]


@flow(name="umim-ablate", flow_run_name="{recipe}")
def ablate(recipe: str = "ablation-thresholds") -> str:
    """Mine, distil and evaluate every cell; return the table and where its files are."""
    with open_pipeline(recipe, "umim-ablate") as run:
        sources, results = parts.train(run)
        parts.evaluate(run, sources, results)
        record_comparison(run, comparison_rows(results, run.recipe.seed))
        name = run.recipe.name
        ablation = run.stage(ablation_stage(recipe=run.recipe, results=results), label=name)
        run.announce(ablation, (ablation.path / f"{name}.md").read_text(encoding="utf-8"))
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
