"""Flow ``umim-adapt``: task-adapted checkpoints of a recipe's cells, or the curves of one task."""

from __future__ import annotations

from prefect import flow

from flows import parts
from flows.adaptation_curves import measure_adaptation
from tasks.report.publish_run import announce_adaptation
from tasks.run.pipeline import open_pipeline
from tasks.run.recipes import find_recipe
from tasks.stages.adaptation_result import RESULT
from umim_core.config.adaptation_recipe import AdaptationRecipe


@flow(name="umim-adapt", flow_run_name="{recipe}")
def adapt(recipe: str = "embedded") -> list[dict[str, str]]:
    """Adapt to a task.

    Returns:
        Checkpoint directories by setting, of each cell; or the folder of the curves' result.
    """
    if isinstance(find_recipe(recipe), AdaptationRecipe):
        with open_pipeline(recipe, "umim-adapt", AdaptationRecipe) as curves:
            adaptation = measure_adaptation(curves)
            announce_adaptation(curves, adaptation)
            return [{RESULT: str(adaptation.path)}]
    with open_pipeline(recipe, "umim-adapt") as run:
        sources = parts.prepare(run)
        results = parts.mine(run, sources)
        parts.distill(run, results)
        run.run_parallel(parts.adaptations(run, sources, results))
        return [
            {name: str(artifact.path / "checkpoint") for name, artifact in result.settings.items()}
            for result in results
        ]
