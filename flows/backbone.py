"""Flow ``umim-backbone``: train the small backbone that the package ships, from its corpus."""

from __future__ import annotations

from prefect import flow

from tasks.backbone import backbone_stage, tokenizer_stage
from tasks.corpus import corpus_stage, tokenize_stage
from tasks.pipeline import open_pipeline
from umim_core.backbone_config import BackboneRecipe
from umim_core.embedded.tokenizer import END_OF_TEXT_ID


@flow(name="umim-backbone", flow_run_name="{recipe}")
def backbone(recipe: str = "backbone-llama") -> str:
    """Train a backbone from nothing.

    Args:
        recipe: Name of a backbone recipe, or a path ending in .yaml.

    Returns:
        The directory of the model: weights, tokenizer, model card.
    """
    with open_pipeline(recipe, "umim-backbone", BackboneRecipe) as run:
        text = run.recipe.corpus
        corpus = run.stage(corpus_stage, text)
        tokenizer = run.stage(tokenizer_stage, corpus, run.recipe)
        tokenized = run.stage(
            tokenize_stage,
            run.lease,
            corpus,
            text,
            str(tokenizer.path / "tokenizer"),
            None,
            END_OF_TEXT_ID,
        )
        trained = run.stage(backbone_stage, run.lease, run.recipe, corpus, tokenizer, tokenized)
        return str(trained.path / "backbone")
