"""Flow ``umim-mine``: the rules of every cell of a recipe."""

from __future__ import annotations

from prefect import flow

from flows import parts
from tasks.run.pipeline import open_pipeline


@flow(name="umim-mine", flow_run_name="{recipe}")
def mine(recipe: str = "embedded") -> list[str]:
    """Build corpus, token ids and rules; return the rule directories."""
    with open_pipeline(recipe, "umim-mine") as run:
        results = parts.mine(run, parts.prepare(run))
        return [str(result.filtered.path / "rules") for result in results]
