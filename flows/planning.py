"""What a recipe would run: the flow's own parts, walked through without running a stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flows import parts
from tasks.lease import ClusterLease
from tasks.stage import Artifact
from umim_core.backbone_config import BackboneRecipe
from umim_core.config import Recipe


class Planner:
    """Stands in for a pipeline run: it notes every stage and hands back an empty artifact."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.lease = ClusterLease(recipe.cluster)
        self.steps: list[dict[str, str]] = []

    def stage(self, function: Callable[..., Artifact], *_: object, label: str = "") -> Artifact:
        """Note a stage."""
        name = function.__name__.removesuffix("_stage").replace("_", "-")
        self.steps.append({"stage": name, "of": label or self.recipe.name})
        return Artifact(name, "", Path(name), "", executed=False)


def plan(recipe: Recipe | BackboneRecipe) -> list[dict[str, str]]:
    """Return the stages of a recipe in the order of the flow, each with what it works on."""
    if isinstance(recipe, BackboneRecipe):
        names = ("corpus", "tokenizer", "tokenize", "backbone")
        return [{"stage": name, "of": recipe.name} for name in names]
    planner = Planner(recipe)
    sources = parts.prepare(planner)
    results = parts.mine(planner, sources)
    parts.distill(planner, results)
    parts.adapt(planner, sources, results)
    parts.evaluate(planner, sources, results)
    parts.benchmark(planner, results)
    parts.measure_shipped(planner, sources)
    return [*planner.steps, {"stage": "report", "of": recipe.name}]
