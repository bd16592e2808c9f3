"""A plan that keeps what every stage is given."""

from __future__ import annotations

from collections.abc import Callable

from tasks.plan.planner import Planner
from tasks.run.stage import Artifact
from umim_core.config.recipe import Recipe


class Recorder(Planner):
    """A plan that keeps what every stage is given.

    Attributes:
        given: Stage function, its arguments without the root, and the label.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.given: list[tuple[Callable[..., Artifact], tuple[object, ...], str]] = []

    def stage(
        self, function: Callable[..., Artifact], *args: object, label: str = "", setting: str = ""
    ) -> Artifact:
        self.given.append((function, args, label))
        return super().stage(function, *args, label=label, setting=setting)
