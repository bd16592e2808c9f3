"""Flow ``umim-backbone``: train the small backbone that the package ships, from its corpus."""

from __future__ import annotations

from prefect import flow

from flows import parts
from tasks.run.pipeline import open_pipeline
from umim_core.config.backbone_recipe import BackboneRecipe


@flow(name="umim-backbone", flow_run_name="{recipe}")
def backbone(recipe: str = "backbone-llama") -> str:
    """Train a backbone from nothing.

    Args:
        recipe: Name of a backbone recipe, or a path ending in .yaml.

    Returns:
        The directory of the model: weights, tokenizer, model card.
    """
    with open_pipeline(recipe, "umim-backbone", BackboneRecipe) as run:
        return str(parts.train_backbone(run).path / "backbone")
