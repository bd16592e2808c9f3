"""Flow ``umim-distill``: a merge checkpoint for every cell of a recipe."""

from __future__ import annotations

from prefect import flow

from flows import parts
from tasks.run.pipeline import open_pipeline
from umim_core.adaptation.settings import WT


@flow(name="umim-distill", flow_run_name="{recipe}")
def distill(recipe: str = "embedded") -> list[str]:
    """Mine rules and distil; return the checkpoint directories."""
    with open_pipeline(recipe, "umim-distill") as run:
        results = parts.mine(run, parts.prepare(run))
        parts.distill(run, results)
        return [str(result.settings[WT].path / "checkpoint") for result in results]
