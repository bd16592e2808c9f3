"""A plan that keeps what every stage is given."""

from __future__ import annotations

from tasks.plan.planner import Planner
from tasks.run.stage import Artifact, StageCall
from umim_core.config.recipe import Recipe


class Recorder(Planner):
    """A plan that keeps what every stage is given.

    Attributes:
        given: Calls of stages, with their labels.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.given: list[tuple[StageCall, str]] = []

    def stage(self, call: StageCall, *, label: str = "", setting: str = "") -> Artifact:
        self.given.append((call, label))
        return super().stage(call, label=label, setting=setting)
