"""Flow ``umim-table``: one table of the paper, scored on the workers of a cluster."""

from __future__ import annotations

from functools import partial

from prefect import flow

from tasks.data.table_sources import check_data, check_limits
from tasks.run.checks import check_backbone_place
from tasks.run.pipeline import PipelineRun, open_pipeline
from tasks.run.stage import Artifact
from tasks.stages.table import TABLE, questions_stage, shards_stage, table_stage, text_stage
from umim_core.config.table_recipe import TableRecipe, TableSetting


@flow(name="umim-table", flow_run_name="{recipe}")
def table(
    recipe: str = "tables/multiple-choice-smollm2", confirm_run_unsafe_code: bool = False
) -> str:
    """Measure one table of the paper."""
    with open_pipeline(recipe, "umim-table", TableRecipe) as run:
        if confirm_run_unsafe_code:
            run.recipe = run.recipe.model_copy(update={"confirm_run_unsafe_code": True})
        check_backbone_place(run.recipe)
        return str(measure_table(run).path / TABLE)


def measure_table(run: PipelineRun[TableRecipe]) -> Artifact:
    """Questions of every task; every task under every setting, and every text; the table."""
    recipe = run.recipe
    check_data(recipe)
    check_limits(recipe)
    questions = {
        task: run.stage(questions_stage, run.lease, recipe, task, label=task)
        for task in recipe.tasks
    }
    places = [(task, setting) for task in recipe.tasks for setting in recipe.settings]
    parts = [partial(_scored, run, questions[task], task, setting) for task, setting in places]
    texts = [
        partial(run.stage, text_stage, run.lease, recipe, text, label=name)
        for name, text in recipe.texts.items()
    ]
    # The driver only waits for workers, so there may be a cell for each of them.
    most = max(recipe.cluster.parallel_stages, recipe.cluster.workers)
    artifacts = run.run_parallel([*parts, *texts], most)
    scores = {(task, of.name): score for (task, of), score in zip(places, artifacts, strict=False)}
    measured = dict(zip(recipe.texts, artifacts[len(places) :], strict=True))
    return run.stage(table_stage, recipe, questions, scores, measured)


def _scored(
    run: PipelineRun[TableRecipe], questions: Artifact, task: str, setting: TableSetting
) -> Artifact:
    label = f"{task} {setting.name}"
    return run.stage(shards_stage, run.lease, questions, run.recipe, setting, label=label)
