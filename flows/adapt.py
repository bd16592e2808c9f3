"""Flow ``umim-adapt``: task-adapted checkpoints for the cells of a recipe that ask for them."""

from __future__ import annotations

from prefect import flow

from flows import parts
from tasks.run.pipeline import open_pipeline


@flow(name="umim-adapt", flow_run_name="{recipe}")
def adapt(recipe: str = "embedded") -> list[dict[str, str]]:
    """Mine, distil and adapt; return each cell's checkpoint directory by setting."""
    with open_pipeline(recipe, "umim-adapt") as run:
        sources = parts.prepare(run)
        results = parts.mine(run, sources)
        parts.distill(run, results)
        parts.adapt(run, sources, results)
        return [
            {name: str(artifact.path / "checkpoint") for name, artifact in result.settings.items()}
            for result in results
        ]
