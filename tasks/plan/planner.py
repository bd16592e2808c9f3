"""Stand-in for a pipeline run that notes stages instead of running them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from tasks.cluster.lease import ClusterLease
from tasks.run.stage import Artifact
from umim_core.config.recipe import RunRecipe

T = TypeVar("T")


class Planner:
    """Stands in for a pipeline run: it notes every stage and hands back an empty artifact.

    Artifacts differ: that of the third stage, ``tokenize``, has the path ``3-tokenize``.
    """

    def __init__(self, recipe: RunRecipe) -> None:
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

    def register(self, backbone: str, trained: Artifact) -> None:
        """Register nothing."""

    def run_parallel(self, parts: Sequence[Callable[[], T]], _: int | None = None) -> list[T]:
        """Note the stages of independent parts, one part after the other."""
        return [part() for part in parts]
