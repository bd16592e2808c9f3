"""Plan of a recipe: its stages and the cost of mining, without running a stage."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from flows import parts
from flows.forecasting import unpredictable
from tasks.cluster.lease import ClusterLease
from tasks.run.stage import Artifact
from umim_core.config.backbone_recipe import BackboneRecipe
from umim_core.config.recipe import FilesCorpus, Recipe
from umim_core.errors import UnknownSizeError
from umim_core.mining.corpus_mining import MiningOptions
from umim_core.mining.costs import Limits, Prediction
from umim_core.mining.mining_forecast import predict_mining


class Planner:
    """Stands in for a pipeline run: it notes every stage and hands back an empty artifact.

    Artifacts are told apart: that of the third stage, ``tokenize``, has the path ``3-tokenize``.
    """

    def __init__(self, recipe: Recipe | BackboneRecipe) -> None:
        self.recipe = recipe
        self.lease = ClusterLease(recipe.cluster)
        self.steps: list[dict[str, str]] = []

    def stage(
        self, function: Callable[..., Artifact], *_: object, label: str = "", setting: str = ""
    ) -> Artifact:
        """Note a stage."""
        name = function.__name__.removesuffix("_stage").replace("_", "-")
        self.steps.append({"stage": name, "of": label or self.recipe.name})
        number = str(len(self.steps))
        return Artifact(name, number, Path(f"{number}-{name}"), "", executed=False)


def plan(recipe: Recipe | BackboneRecipe) -> list[dict[str, str]]:
    """Return the stages of a recipe in the order of the flow, each with what it works on."""
    planner = Planner(recipe)
    if isinstance(recipe, BackboneRecipe):
        parts.train_backbone(planner)
        return planner.steps
    parts.run_everything(planner)
    return [*planner.steps, {"stage": "report", "of": recipe.name}]


def predict(recipe: Recipe | BackboneRecipe) -> dict[str, Prediction]:
    """Predict what mining takes, per backbone, from about 10 MB of the recipe's own text.

    Returns:
        Nothing for a corpus that is not there before the run, as the docstring corpus, whose size
        its files do not tell and ``train_tokens`` neither, or that is too small; see
        :func:`flows.forecasting.unpredictable`.

    Raises:
        CorpusError: If the text cannot be read.
        ConfigError: If a protected pattern is malformed.
    """
    if not isinstance(recipe, Recipe) or not isinstance(recipe.corpus, FilesCorpus):
        return {}
    if unpredictable(recipe) is not None:
        return {}
    mining, found = recipe.mining, {}
    counted = [cell for cell in recipe.cells if cell.source == "frequency" and cell.rules is None]
    for backbone, revision in dict.fromkeys((cell.backbone, cell.revision) for cell in counted):
        cells = [cell for cell in counted if (cell.backbone, cell.revision) == (backbone, revision)]
        try:
            told = predict_mining(
                recipe.corpus.train,
                tokenizer=backbone,
                revision=revision,
                options=MiningOptions(
                    tau=min(cell.tau for cell in cells),
                    segment_length=recipe.segment_length,
                    protect=mining.protect,
                    min_documents=mining.min_documents,
                    sample_tokens=mining.sample_tokens,
                    max_candidates=mining.max_candidates,
                ),
                at_most=recipe.corpus.train_tokens,
                block_tokens=mining.block_tokens,
                workers=recipe.cluster.cpus or os.cpu_count() or 1,
            )
        except UnknownSizeError:
            continue
        if told is not None:
            found[backbone] = told
    return found


def check_limits(recipe: Recipe | BackboneRecipe, predictions: Iterable[Prediction]) -> None:
    """Refuse predictions beyond the recipe's limits.

    Raises:
        ResourceLimitError: If there is one.
    """
    if isinstance(recipe, Recipe):
        mining = recipe.mining
        limits = Limits.of(mining.max_memory_gib, mining.max_disk_gib, mining.max_hours)
        for prediction in predictions:
            limits.check(prediction)
